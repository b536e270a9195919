// The parameters that the server writes into its images, in A1111's form, read back into fields of a request.

const TAG = / ?<(lora|lyco|hypernet):([^<>]*)>/g;
const ABOUT = ["Model hash", "VAE hash", "Lora hashes", "Hashes", "Version", "User", "Time taken"]; // change no pixel
const SPACINGS = / (Karras|Exponential)$/; // A1111 before 1.9 had them in the sampler's name

/** Return the text that a PNG carries under `parameters`, or null. Throws a sentence if it is no PNG. */
export async function parametersOf(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (!["image/png", ""].includes(blob.type) || bytes[0] !== 0x89 || bytes[1] !== 0x50) {
    throw new Error("only PNG files carry settings that can be restored here");
  }
  const view = new DataView(bytes.buffer);
  let at = 8;
  while (at + 12 <= bytes.length) {
    const size = view.getUint32(at);
    const type = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    const text = await textOf(type, bytes.subarray(at + 8, at + 8 + size));
    if (text !== null) return text;
    at += 12 + size;
  }
  return null;
}

async function textOf(type, data) {
  if (!["tEXt", "iTXt", "zTXt"].includes(type)) return null;
  const end = data.indexOf(0);
  if (new TextDecoder("latin1").decode(data.subarray(0, end)) !== "parameters") return null;
  if (type === "tEXt") return new TextDecoder("latin1").decode(data.subarray(end + 1));
  if (type === "zTXt") return new TextDecoder("latin1").decode(await inflated(data.subarray(end + 2)));
  const isPacked = data[end + 1] === 1;
  const language = data.indexOf(0, end + 3);
  const translated = data.indexOf(0, language + 1);
  const text = data.subarray(translated + 1);
  return new TextDecoder().decode(isPacked ? await inflated(text) : text);
}

async function inflated(data) {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Return the fields of a request, as far as the model knows them: the one that the text names, if it is among `models`,
 * or else `chosen`. `lost` lists the rest: what the text cannot hold, as control images, and what A1111 was asked for
 * that is not done here.
 */
export function fieldsOf(text, models, chosen) {
  const lines = text.split("\n");
  const last = /^Steps: \d+/.test(lines.at(-1)) ? lines.pop() : "";
  const negativeAt = lines.findIndex((line) => line.startsWith("Negative prompt: "));
  const negative = negativeAt < 0 ? "" : lines.splice(negativeAt).join("\n").slice("Negative prompt: ".length);
  const loras = [];
  const lost = [];
  const prompt = lines.join("\n").replace(TAG, (tag, kind, text) => {
    const [name, scale = "1", ...more] = text.split(":");
    if (kind === "lora" && Number.isFinite(Number(scale)) && !more.length) loras.push({ name, scale: Number(scale) });
    else lost.push(tag.trim());
    return "";
  });
  const pairs = pairsOf(last);
  const model = models.find(({ id }) => id === pairs.get("Model")) ?? chosen;
  const fields = { prompt, negative_prompt: negative, loras, ...numbersOf(pairs, model, lost) };
  return { fields, lost: [...lost, ...[...pairs].map(([key, value]) => `${key} (${value.slice(0, 40)})`)] };
}

/** Take what the model has out of the pairs; what else they name that has a word of its own goes into `lost`. */
function numbersOf(pairs, { scheduler_names: schedulers, controls }, lost) {
  const found = {};
  const pop = (key) => { const value = pairs.get(key); pairs.delete(key); return value; };
  const take = (key, field, read) => { if (pairs.has(key)) found[field] = read(pop(key)); };
  const isForeign = pairs.has("Version") || pairs.has("Model hash");
  for (const key of ABOUT) pairs.delete(key);
  take("Steps", "num_inference_steps", Number);
  take("CFG scale", "guidance_scale", Number);
  if (Number.isSafeInteger(Number(pairs.get("Seed")))) take("Seed", "seed", Number); // a longer one would lose digits
  take("Size", "size", String);
  take("Model", "model", String);
  if (pairs.has("Denoising strength") && ![...pairs.keys()].some((key) => key.startsWith("Hires "))) {
    take("Denoising strength", "strength", Number);
    lost.push("the image it started from");
  }
  const guided = [...pairs.keys()].filter((key) => key.startsWith("ControlNet "));
  if (guided.length) lost.push("the control image");
  guided.forEach(pop);

  const sampler = pop("Sampler") ?? "";
  const named = Object.entries(schedulers);
  const ours = named.find(([, theirs]) => theirs === sampler) ?? named.find(([, theirs]) => theirs === sampler.replace(SPACINGS, ""));
  if (ours !== undefined) found.scheduler = ours[0];
  else if (sampler) lost.push(`the sampler ${sampler}`);
  if (SPACINGS.test(sampler) && !pairs.has("Schedule type")) pairs.set("Schedule type", SPACINGS.exec(sampler)[1]);
  if (pairs.get("Schedule type") === "Automatic") pairs.delete("Schedule type");

  if (isForeign && controls?.some(({ name }) => name === "prompt_syntax")) found.prompt_syntax = "a1111";
  const readers = { string: String, boolean: (text) => text === "True", "Clip skip": (text) => Number(text) - 1,
    "Schedule type": (text) => text.toLowerCase() };
  for (const { infotext, label, name, schema } of controls ?? []) {
    const key = infotext ?? label;
    const read = readers[key] ?? readers[schema.type] ?? Number;
    if (schema.enum?.includes(read(pairs.get(key) ?? "")) ?? true) take(key, name, read);
  }
  return found;
}

/** Split `Key: value, Key: "quoted, value"`. */
function pairsOf(line) {
  const pairs = new Map();
  for (const [, key, value] of line.matchAll(/\s*([^:,]+): ("(?:\\.|[^"\\])+"|[^,]*)(?:,|$)/g)) {
    pairs.set(key.trim(), value.startsWith('"') ? unquoted(value) : value.trim());
  }
  return pairs;
}

function unquoted(value) {
  try {
    return JSON.parse(value);
  } catch {
    return value;
  }
}
