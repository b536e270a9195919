// The parameters that the server writes into its images, in A1111's form, read back into fields of a request.

const LORA = / ?<lora:([^:<>]+):(-?[0-9.e+-]+)>/g;

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
 * Return the fields of a request, as far as the model knows them. `lost` lists what the text cannot hold: control
 * images, and the image that an edit started from.
 */
export function fieldsOf(text, model) {
  const lines = text.split("\n");
  const last = /^Steps: \d+/.test(lines.at(-1)) ? lines.pop() : "";
  const negativeAt = lines.findIndex((line) => line.startsWith("Negative prompt: "));
  const negative = negativeAt < 0 ? "" : lines.splice(negativeAt).join("\n").slice("Negative prompt: ".length);
  const loras = [];
  const prompt = lines.join("\n").replace(LORA, (_, name, scale) => {
    loras.push({ name, scale: Number(scale) });
    return "";
  });
  return { fields: { prompt, negative_prompt: negative, loras, ...numbersOf(pairsOf(last), model) },
           lost: lostOf(pairsOf(last)) };
}

function numbersOf(pairs, { scheduler_names: schedulers, controls }) {
  const found = {};
  const take = (key, field, read) => { if (pairs.has(key)) found[field] = read(pairs.get(key)); };
  take("Steps", "num_inference_steps", Number);
  take("CFG scale", "guidance_scale", Number);
  take("Seed", "seed", Number);
  take("Size", "size", String);
  take("Model", "model", String);
  take("Denoising strength", "strength", Number);
  const readers = { string: String, boolean: (text) => text === "True" };
  for (const { infotext, name, schema } of controls ?? []) take(infotext, name, readers[schema.type] ?? Number);
  const ours = Object.entries(schedulers).find(([, theirs]) => theirs === pairs.get("Sampler"));
  if (ours !== undefined) found.scheduler = ours[0];
  return found;
}

function lostOf(pairs) {
  const lost = [...pairs.keys()].filter((key) => key.startsWith("ControlNet ")).length ? ["the control image"] : [];
  return pairs.has("Denoising strength") ? [...lost, "the image it started from"] : lost;
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
