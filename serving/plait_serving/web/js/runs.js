// Requests under way: each image is a tile with its steps, its previews and a way to stop it.
import { ApiError, stream } from "./api.js";
import { blobOf, MIME } from "./bytes.js";
import { h, icon, say } from "./dom.js";
import { unwatch, watch } from "./queue.js";

/** Start all requests; returns their tiles. `ondone(image)` gets each finished one as the gallery keeps it. */
export function start(requests, ondone) {
  return requests.map(({ path, body }, i) => new Tile(path, body, i, ondone));
}

export class Tile {
  constructor(path, body, place, ondone) {
    Object.assign(this, { path, body, place, ondone, state: "waiting" });
    this.abort = new AbortController();
    this.picture = h("img", { class: "pixels", alt: "" });
    this.picture.hidden = true;
    this.text = h("span", { class: "tile-text" }, "asking");
    this.bar = h("div", { class: "bar", role: "progressbar", "aria-label": `seed ${body.seed}`, "aria-valuemin": "0",
      "aria-valuemax": String(body.num_inference_steps), "aria-valuenow": "0" }, h("span"));
    this.stop = h("button", { type: "button", class: "quiet", onclick: () => this.cancel() }, icon("stop"),
      h("span", {}, "Cancel"));
    this.element = h("div", { class: "tile waiting" }, h("div", { class: "canvas" }, this.picture),
      h("div", { class: "tile-foot" }, this.text, this.stop, this.bar));
    this.ended = this.run();
  }

  get isOpen() {
    return this.state === "waiting" || this.state === "running";
  }

  cancel() {
    this.abort.abort();
  }

  async run() {
    const began_ms = performance.now();
    try {
      for await (const event of stream(this.path, this.body, this.abort.signal)) {
        if (event.accepted) {
          watch(this);
          continue;
        }
        unwatch(this);
        if (event.done) return await this.finish(event.done, performance.now() - began_ms);
        this.show(event);
      }
      throw new ApiError(500, { message: "the server ended without an image" });
    } catch (error) {
      this.fail(error);
    } finally {
      unwatch(this);
    }
    return null;
  }

  /** Say where in the queue the request is, at most: `waiting` requests wait. */
  tellQueue(waiting) {
    this.queuePlace = Math.max(1, Math.min(this.queuePlace ?? Infinity, waiting));
    this.text.textContent = waiting ? `in the queue: at place ${this.queuePlace} or before` : "starting";
  }

  show({ step, steps, preview }) {
    this.state = "running";
    this.element.classList.replace("waiting", "running");
    if (preview) return this.paint(blobOf(preview.b64_json, MIME[preview.output_format]), "a preview");
    this.text.textContent = `step ${step} of ${steps}`;
    this.bar.setAttribute("aria-valuemax", String(steps));
    this.bar.setAttribute("aria-valuenow", String(step));
    this.bar.firstChild.style.setProperty("width", `${(100 * step) / steps}%`);
    return undefined;
  }

  paint(blob, alt) {
    const src = URL.createObjectURL(blob);
    this.picture.onload = () => URL.revokeObjectURL(src);
    Object.assign(this.picture, { src, alt, hidden: false });
  }

  async finish(done, took_ms) {
    const blob = blobOf(done.b64_json, MIME[done.output_format]);
    const { stream: _, partial_images: __, ...body } = this.body;
    const [width, height] = done.size.split("x").map(Number);
    const image = { blob, path: this.path, body, width, height, created_ms: Date.now(), took_ms,
      timings: done.timings, flagged: done.flagged, hints: done.hints };
    for (const hint of done.hints ?? []) say(hint, "aloud");
    this.state = "done";
    this.element.classList.remove("waiting", "running");
    this.paint(blob, `${body.prompt}, seed ${body.seed}`);
    this.element.querySelector(".tile-foot").remove();
    await this.ondone(image, this);
    return image;
  }

  fail(error) {
    const isOurs = error.name === "AbortError";
    this.state = isOurs ? "cancelled" : "failed";
    this.element.classList.remove("waiting", "running");
    this.element.classList.add("failed");
    this.text.textContent = isOurs ? "cancelled" : error.message;
    this.stop.remove();
    if (this.picture.hidden) { // nothing was seen yet: the card says why
      this.element.querySelector(".canvas").replaceChildren(this.text);
      this.element.querySelector(".tile-foot").remove();
    }
    if (!isOurs) say(error.message, "error");
  }
}
