// ControlNets: an image is dropped or drawn, and what the ControlNet will see of it is shown.
import { postJson } from "./api.js";
import { base64Of, bitmapOf, blobOf } from "./bytes.js";
import { dropZone } from "./drop.js";
import { h, icon, iconButton, say, slider } from "./dom.js";
import { paint } from "./paint.js";

export class Controls {
  /** `sizeOf()` gives the output's size as `[width, height]`. */
  constructor(box, { sizeOf, onchange }) {
    this.buttons = h("div", { class: "chips", role: "group", "aria-label": "Add a ControlNet" });
    this.list = h("div", { class: "stack" });
    box.append(this.buttons, this.list);
    Object.assign(this, { sizeOf, onchange });
    this.cards = [];
    this.known = [];
    this.made = 0;
  }

  know(controlnets) {
    this.known = controlnets;
    this.cards.filter(({ known }) => !controlnets.some(({ id }) => id === known.id)).forEach((card) => this.remove(card));
    this.buttons.replaceChildren(...controlnets.map((known) => h("button", {
      type: "button", class: "chip", onclick: () => this.add(known).focus(),
    }, icon("plus"), known.id)));
  }

  add(known) {
    this.made += 1;
    const card = new ControlCard(known, `control-${this.made}`, this);
    this.cards.push(card);
    this.list.append(card.element);
    return card;
  }

  remove(card) {
    this.cards = this.cards.filter((each) => each !== card);
    card.element.remove();
    this.onchange();
  }

  read() {
    return this.cards.map((card) => card.read()).filter((control) => control !== null);
  }

  async write(controlnets) {
    for (const card of [...this.cards]) this.remove(card);
    for (const control of controlnets) {
      const known = this.known.find(({ id }) => id === control.name);
      if (known) await this.add(known).write(control);
    }
  }

  /** Take an image for the first ControlNet there is. */
  async use(blob) {
    if (!this.known.length) throw new Error("this model takes no ControlNet");
    const card = this.cards[0] ?? this.add(this.known[0]);
    await card.take(blob, card.known.preprocessor !== null);
  }
}

class ControlCard {
  constructor(known, id, owner) {
    Object.assign(this, { known, id, owner });
    this.image = null; // base64 of what was dropped or drawn
    this.shown = h("div", { class: "pair" });
    this.scale = slider({ id: `${id}-scale`, label: "Strength", min: 0, max: 2, step: 0.05, value: 1, oninput: owner.onchange });
    this.start = slider({ id: `${id}-start`, label: "From", min: 0, max: 1, step: 0.05, value: 0, oninput: owner.onchange });
    this.end = slider({ id: `${id}-end`, label: "Until", min: 0, max: 1, step: 0.05, value: 1, oninput: owner.onchange });
    this.detect = h("input", { type: "checkbox", id: `${id}-detect`, checked: known.preprocessor !== null,
      disabled: known.preprocessor === null, onchange: () => this.look() });
    this.zone = dropZone(`Image for ${known.id}: drop, paste or choose`, (blob) => this.take(blob, this.detect.checked));
    this.element = this.card();
  }

  card() {
    const { id, known } = this;
    return h("section", { class: "card stack", "aria-label": `ControlNet ${known.id}` },
      h("div", { class: "row" }, h("h3", {}, known.id), h("span", { class: "grow" }),
        iconButton("brush", `Draw a map for ${known.id}`, () => this.draw(), "Draw"),
        iconButton("close", `Remove ControlNet ${known.id}`, () => this.owner.remove(this))),
      this.zone, this.shown,
      h("label", { class: "check", for: `${id}-detect` }, this.detect,
        known.preprocessor === null ? "The image is the map" : `Make the map from an ordinary image (${known.preprocessor})`),
      this.scale.element,
      h("details", {}, h("summary", {}, "When it acts"), h("div", { class: "stack" }, this.start.element, this.end.element)));
  }

  focus() {
    this.zone.querySelector("button").focus();
  }

  async take(blob, isOrdinary) {
    await bitmapOf(blob);
    this.image = await base64Of(blob);
    this.detect.checked = isOrdinary && this.known.preprocessor !== null;
    await this.look();
    this.owner.onchange();
  }

  async draw() {
    const [width, height] = this.owner.sizeOf();
    const drawn = await paint({ title: `A map for ${this.known.id}`, width, height });
    if (drawn) await this.take(drawn, false);
  }

  /** Ask the server for the map, and show it beside the image. */
  async look() {
    if (this.image === null) return;
    const [width, height] = this.owner.sizeOf();
    const asked = this.looking = Symbol("the newest question");
    try {
      const map = await postJson("v1/images/control_maps", {
        name: this.known.id, image: this.image, preprocess: this.detect.checked, size: `${width}x${height}`,
      });
      if (this.looking !== asked) return;
      this.shown.replaceChildren(
        figure(this.image, "image", `the image for ${this.known.id}`),
        figure(map.b64_json, "what it sees", `the map that ${this.known.id} sees`));
    } catch (error) {
      say(`${this.known.id}: ${error.message}`, "error");
    }
    this.owner.onchange();
  }

  read() {
    if (this.image === null) return null;
    return {
      name: this.known.id, image: this.image, preprocess: this.detect.checked,
      scale: this.scale.read(), start: this.start.read(), end: this.end.read(),
    };
  }

  async write(control) {
    this.image = control.image;
    this.detect.checked = Boolean(control.preprocess);
    this.scale.write(control.scale ?? 1);
    this.start.write(control.start ?? 0);
    this.end.write(control.end ?? 1);
    await this.look();
  }
}

function figure(base64, caption, alt) {
  const src = URL.createObjectURL(blobOf(base64));
  const image = h("img", { src, alt, class: "pixels", onload: () => URL.revokeObjectURL(src) });
  return h("figure", {}, image, h("figcaption", {}, caption));
}
