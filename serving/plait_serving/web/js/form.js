// The form of an image request: from what the server has to controls, and from controls to a body and back.
import { byId, h, slider } from "./dom.js";
import { Controls } from "./controls.js";
import { Fields } from "./fields.js";
import { Loras } from "./loras.js";
import { DRAFT } from "./names.js";
import { Prompt } from "./prompt.js";
import { Source } from "./source.js";

const SEED_END = 2 ** 32; // the server's own random seeds are below it
const PREVIEWS = 3;
const SHAPES = [[1, 1], [3, 2], [2, 3], [4, 3], [3, 4], [16, 9], [9, 16]];

export class Form {
  constructor(onsubmit) {
    this.element = byId("form");
    const changed = () => this.keepDraft();
    this.prompt = new Prompt(byId("prompt"), changed);
    this.steps = slider({ id: "steps", label: "Steps", min: 1, max: 50, step: 1, value: 20, oninput: changed });
    this.guidance = slider({ id: "guidance", label: "CFG", min: 0, max: 20, step: 0.5, value: 3, oninput: changed });
    byId("numbers").append(this.steps.element, this.guidance.element);
    this.fields = new Fields(byId("fields"), changed);
    this.loras = new Loras(byId("loras"), changed);
    this.controls = new Controls(byId("controlnets"), { sizeOf: () => this.size(), onchange: changed });
    this.source = new Source(byId("source"), { onchange: changed, ongiven: (...size) => { this.fit(...size); changed(); } });
    this.models = [];
    this.element.addEventListener("submit", (event) => { event.preventDefault(); onsubmit(); });
    this.element.addEventListener("input", changed);
    this.element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); onsubmit(); }
    });
    byId("model").addEventListener("change", () => this.choose(this.model));
    byId("size").addEventListener("input", () => this.markShape());
    byId("dice").addEventListener("click", () => { byId("seed").value = randomSeed(); changed(); });
  }

  get model() {
    return this.models.find(({ id }) => id === byId("model").value) ?? this.models[0];
  }

  /** Take what the server has. `words`: what models know, by name. */
  know({ models, words, loras, controlnets }) {
    this.models = models;
    this.words = words;
    this.controlnets = controlnets;
    byId("model").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    byId("loras-part").hidden = loras.length === 0;
    this.loras.know(loras.map(({ id }) => id));
    this.choose(models[0]);
  }

  /** Set the controls to a model's bounds and defaults. */
  choose(model) {
    const { limits } = model;
    byId("scheduler").replaceChildren(...model.schedulers.map((value) =>
      h("option", { value }, model.scheduler_names?.[value] ?? value)));
    byId("scheduler").value = model.default_scheduler;
    this.steps.bound({ max: Math.min(limits.max_steps, 100) });
    this.steps.write(model.default_num_inference_steps);
    this.guidance.write(model.default_guidance_scale);
    this.guidance.element.hidden = !takes(model, "guidance_scale");
    byId("more").hidden = !takes(model, "negative_prompt");
    byId("source-part").hidden = !takes(model, "image");
    this.source.know(takes(model, "mask"));
    this.fields.know(model.controls ?? []);
    byId("finer").hidden = !model.controls?.length;
    byId("shapes").replaceChildren(...[...shapesOf(model)].map(([size, name]) => h("button", { type: "button", class: "chip shape",
      title: size, dataset: { size }, onclick: () => { this.setSize(size); this.keepDraft(); } },
    h("span", { style: { "aspect-ratio": size.replace("x", " / ") } }), name)));
    this.setSize(model.default_size);
    byId("n").max = limits.max_images ?? 10;
    byId("seed").max = Number.MAX_SAFE_INTEGER + 1 - byId("n").max; // image i uses seed + i, to the last digit
    this.prompt.know(this.words[model.base ?? model.id]?.concepts ?? []);
    const fitting = this.controlnets.filter(({ id }) => model.controlnets?.includes(id) ?? true);
    byId("controlnets-part").hidden = fitting.length === 0;
    this.controls.know(fitting);
  }

  setSize(size) {
    byId("size").value = size;
    this.markShape();
  }

  /** Of the sizes that are offered, choose the one of an image's shape; what is chosen stays if it is as near. */
  fit(width, height) {
    const away = (x, y) => Math.abs(Math.log((x * height) / (y * width)));
    const nearest = [...byId("shapes").children].map(({ dataset }) => dataset.size)
      .reduce((best, size) => (away(...size.split("x")) < away(...best.split("x")) ? size : best), this.size().join("x"));
    this.setSize(nearest);
  }

  markShape() {
    const size = byId("size").value.trim();
    for (const shape of byId("shapes").children) shape.setAttribute("aria-pressed", String(shape.dataset.size === size));
  }

  /** Return the output's size as `[width, height]`. */
  size() {
    const found = /^(\d+)x(\d+)$/.exec(byId("size").value.trim()) ?? /^(\d+)x(\d+)$/.exec(this.model.default_size);
    return [Number(found[1]), Number(found[2])];
  }

  /** Return one request per image: `{path, body}`, all with seeds. `null` if something is missing, which is shown. */
  requests() {
    if (!this.element.reportValidity()) return null;
    const given = byId("seed").value;
    const seed = given === "" || Number(given) < 0 ? randomSeed() : Number(given);
    const count = Number(byId("n").value);
    const source = takes(this.model, "image") ? this.source.read() : null;
    const path = source ? "v1/images/edits" : "v1/images/generations";
    return Array.from({ length: count }, (_, i) => ({ path, body: this.body(seed + i, source) }));
  }

  body(seed, source) {
    const steps = this.steps.read();
    const [loras, controlnets] = [this.loras.read(), this.controls.read()];
    const model = this.model;
    const negative = takes(model, "negative_prompt") ? byId("negative").value : "";
    const guidance = takes(model, "guidance_scale") ? { guidance_scale: this.guidance.read() } : {};
    return {
      model: model.id, prompt: byId("prompt").value, ...(negative ? { negative_prompt: negative } : {}),
      size: byId("size").value.trim(), num_inference_steps: steps, ...guidance,
      scheduler: byId("scheduler").value, seed,
      ...this.fields.read(), ...(loras.length ? { loras } : {}), ...(controlnets.length ? { controlnets } : {}), ...source,
      stream: true, partial_images: Math.max(0, Math.min(PREVIEWS, steps - 1)),
    };
  }

  /** Take the fields of a request; the rest stays. Returns what the server does not have. */
  async write(fields) {
    const lost = [];
    if (fields.model !== undefined && fields.model !== this.model.id) {
      if (this.models.some(({ id }) => id === fields.model)) {
        byId("model").value = fields.model;
        this.choose(this.model);
      } else lost.push(`the model ${fields.model}`);
    }
    this.prompt.write(fields.prompt ?? "");
    byId("negative").value = fields.negative_prompt ?? "";
    byId("more").open ||= Boolean(fields.negative_prompt);
    if (fields.size) this.setSize(fields.size);
    if (fields.scheduler) byId("scheduler").value = fields.scheduler;
    if (fields.num_inference_steps) this.steps.write(fields.num_inference_steps);
    if (fields.guidance_scale !== undefined) this.guidance.write(fields.guidance_scale);
    if (fields.seed !== undefined) byId("seed").value = fields.seed;
    this.fields.write(fields);
    byId("finer").open ||= Object.keys(this.fields.read()).length > 0;
    byId("n").value = 1;
    lost.push(...this.loras.write(fields.loras ?? []).map((name) => `the LoRA ${name}`));
    await this.controls.write(fields.controlnets ?? []);
    if (fields.image) await this.source.write(fields);
    else if (this.source.isUsed) this.source.clear();
    this.keepDraft();
    return lost;
  }

  /** Keep the texts and numbers of the form for a reload. */
  keepDraft() {
    const fields = { prompt: byId("prompt").value, negative_prompt: byId("negative").value, size: byId("size").value,
      scheduler: byId("scheduler").value, num_inference_steps: this.steps.read(), guidance_scale: this.guidance.read(),
      model: byId("model").value, loras: this.loras.read(), ...this.fields.read() };
    sessionStorage.setItem(DRAFT, JSON.stringify(fields));
  }

  async restoreDraft() {
    const kept = sessionStorage.getItem(DRAFT);
    if (kept !== null) await this.write(JSON.parse(kept));
  }
}

/** Whether a field means something to a model. */
function takes({ fields }, name) {
  return fields?.includes(name) ?? true;
}

function randomSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] % SEED_END;
}

/** Return shapes by size: of those that are listed, or else by what a model makes of each, as many pixels as it was
 * trained for, where they are allowed. */
function shapesOf({ default_size: size, limits }) {
  const [width, height] = size.split("x").map(Number);
  const step = limits.size_multiple;
  const edge = (share) => Math.max(1, Math.round(Math.sqrt(width * height * share) / step)) * step;
  const ranges = (limits.sizes ?? []).map((text) => text.split("-").map((end) => end.split("x").map(Number)));
  const listed = ranges.filter((ends) => ends.length === 1).map(([edges]) => [edges, edges.join("x")]);
  const shapes = SHAPES.map(([x, y]) => [[edge(x / y), edge(y / x)], `${x}:${y}`]);
  const fits = (edges) => edges[0] * edges[1] <= limits.max_pixels && Math.max(...edges) <= limits.max_edge_px
    && Math.min(...edges) >= limits.min_edge_px && edges.every((each) => each % step === 0) && (ranges.length === 0
    || ranges.some(([least, most = least]) => edges.every((each, i) => least[i] <= each && each <= most[i])));
  const found = new Map();
  for (const [edges, name] of [...listed, ...shapes]) {
    if (fits(edges) && !found.has(edges.join("x"))) found.set(edges.join("x"), name);
  }
  return found;
}
