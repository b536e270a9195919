// The gallery: what was made in this browser. One image is shown large with its settings; the others are small.
import { MIME } from "./bytes.js";
import { byId, h, iconButton, say } from "./dom.js";
import { asCurl, asPython } from "./snippets.js";
import * as store from "./store.js";

export class Gallery {
  /** `actions`: `restore(image)`, `edit(image)` and `control(image)` or null where the server has none. */
  constructor(actions) {
    this.actions = actions;
    this.grid = byId("grid");
    this.stage = byId("stage");
    this.details = byId("details");
    this.images = [];
    byId("clear").addEventListener("click", () => this.clear());
    this.grid.addEventListener("keydown", (event) => this.move(event));
  }

  async load() {
    this.images = await store.kept();
    this.grid.replaceChildren(...this.images.map((image) => this.thumbnail(image)));
    if (this.images.length) this.choose(this.images[0]);
    this.count();
  }

  /** Keep a finished image. Its tile stays where it is, and now opens it. */
  async add(image, tile) {
    try {
      image.id = await store.keep(image);
    } catch {
      say("the browser keeps no more images: this one is gone when the page is left", "error");
    }
    this.images.unshift(image);
    this.grid.prepend(this.thumbnail(image));
    this.count();
    tile.element.querySelector(".canvas").replaceWith(this.opener(image, tile.picture));
    if (tile.place === 0 || !this.chosen) this.choose(image, false);
    say(`made: ${image.body.prompt}, seed ${image.body.seed}`, "aloud");
  }

  /** Show the tiles of a run. */
  run(tiles) {
    this.details.hidden = true;
    this.stage.dataset.count = String(Math.min(tiles.length, 4));
    this.stage.replaceChildren(...tiles.map(({ element }) => element));
    this.chosen = null;
  }

  thumbnail(image) {
    const src = URL.createObjectURL(image.blob);
    const picture = h("img", { src, class: "pixels", alt: `${image.body.prompt}, seed ${image.body.seed}`, loading: "lazy" });
    picture.addEventListener("load", () => URL.revokeObjectURL(src));
    image.element = h("li", {}, h("button", { type: "button", class: "thumb", onclick: () => this.choose(image) }, picture));
    return image.element;
  }

  choose(image, isAlone = true) {
    this.chosen = image;
    for (const each of this.images) each.element.classList.toggle("chosen", each === image);
    if (isAlone) {
      const src = URL.createObjectURL(image.blob);
      const picture = h("img", { src, class: "pixels", alt: `${image.body.prompt}, seed ${image.body.seed}` });
      picture.addEventListener("load", () => URL.revokeObjectURL(src));
      this.stage.dataset.count = "1";
      this.stage.replaceChildren(h("div", { class: "tile" }, this.opener(image, picture)));
    }
    this.tell(image);
  }

  /** Put a picture on the stage into what shows it at full size. */
  opener(image, picture) {
    const open = () => { this.choose(image, false); enlarge(image, picture.alt); };
    return h("button", { type: "button", class: "canvas", "aria-label": `At full size: ${picture.alt}`, onclick: open }, picture);
  }

  tell(image) {
    const { body } = image;
    const seconds = (image.took_ms / 1000).toFixed(1);
    const facts = [`seed ${body.seed}`, `${image.width} × ${image.height}`, `${body.num_inference_steps} steps`,
      ...(body.guidance_scale === undefined ? [] : [`CFG ${body.guidance_scale}`]), body.scheduler, ...(body.loras ?? []).map(({ name, scale }) => `${name} ${scale}`),
      ...(body.controlnets ?? []).map(({ name }) => name), ...(body.image ? [body.strength === undefined ? "edit" : `edit ${body.strength}`] : []), `${seconds} s`];
    const act = (name, title, work, label) => iconButton(name, title, work, label);
    this.details.hidden = false;
    this.details.replaceChildren(
      h("h2", {}, body.prompt),
      h("ul", { class: "facts", "aria-label": "Settings" }, facts.map((fact) => h("li", {}, fact))),
      ...(image.hints ?? []).map((hint) => h("p", { class: "warning" }, hint)),
      h("div", { class: "row wrap" },
        act("restore", "Put these settings into the form", () => this.actions.restore(image), "Settings"),
        ...(this.actions.edit ? [act("brush", "Start an edit from this image", () => this.actions.edit(image), "Edit")] : []),
        ...(this.actions.control ? [act("layers", "Use this image for a ControlNet", () => this.actions.control(image), "Control")] : []),
        act("copy", "Copy as a curl command", () => copy(asCurl(image.path, body), "curl"), "curl"),
        act("copy", "Copy as a Python program", () => copy(asPython(image.path, body), "Python"), "Python"),
        act("download", "Download", () => this.download(image), "Save"),
        act("trash", "Delete this image", () => this.remove(image), "Delete")));
  }

  download(image) {
    const href = URL.createObjectURL(image.blob);
    const ending = Object.entries(MIME).find(([, type]) => type === image.blob.type)?.[0] ?? "png";
    const name = image.body.prompt.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-").slice(0, 40) || "image";
    h("a", { href, download: `${name}-${image.body.seed}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(href), 10000);
  }

  async remove(image) {
    if (image.id !== undefined) await store.forget(image.id);
    image.element.remove();
    this.images = this.images.filter((each) => each !== image);
    if (this.images.length) this.choose(this.images[0]);
    this.count();
  }

  async clear() {
    if (!confirm(`Delete all ${this.images.length} images that this browser keeps?`)) return;
    await store.forgetAll();
    this.images = [];
    this.grid.replaceChildren();
    this.count();
  }

  count() {
    byId("gallery-count").textContent = this.images.length ? String(this.images.length) : "";
    byId("clear").hidden = this.images.length === 0;
    if (this.images.length) return;
    this.details.hidden = true;
    this.stage.dataset.count = "0";
    this.stage.replaceChildren(byId("empty").content.cloneNode(true));
  }

  /** Arrow keys go through the thumbnails. */
  move(event) {
    const buttons = [...this.grid.querySelectorAll("button")];
    const at = buttons.indexOf(document.activeElement);
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (at < 0 || by === undefined || !buttons[at + by]) return;
    event.preventDefault();
    buttons[at + by].focus();
  }
}

/** Show an image pixel by pixel, or a small one larger by a whole factor. */
function enlarge({ blob, width, height }, name) {
  const dialog = byId("large");
  const picture = dialog.querySelector("img");
  const src = URL.createObjectURL(blob);
  picture.onload = () => URL.revokeObjectURL(src);
  picture.src = src;
  const times = Math.max(1, Math.floor(Math.min((0.9 * innerWidth) / width, (0.85 * innerHeight) / height)));
  picture.style.setProperty("width", `${times * width}px`);
  dialog.setAttribute("aria-label", name);
  dialog.showModal();
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`copied as ${what}`);
  } catch {
    const shown = byId("text");
    shown.querySelector("textarea").value = text;
    shown.showModal(); // without https the browser has no clipboard
    shown.querySelector("textarea").select();
  }
}
