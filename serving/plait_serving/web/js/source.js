// The image that an edit starts from, and the mask painted over it.
import { base64Of, bitmapOf, blobOf } from "./bytes.js";
import { dropZone } from "./drop.js";
import { h, iconButton, slider } from "./dom.js";
import { paint } from "./paint.js";

const WITHOUT_MASK = 0.8; // the server's own values
const WITH_MASK = 1;

export class Source {
  /** `ongiven(width, height)` is called for an image that somebody gives. */
  constructor(box, { onchange, ongiven }) {
    Object.assign(this, { onchange, ongiven });
    this.image = null;
    this.mask = null;
    this.bitmap = null;
    this.zone = dropZone("Start from an image: drop, paste or choose", (blob) => this.give(blob));
    this.shown = h("figure", { class: "source" });
    this.strength = slider({ id: "strength", label: "Strength", min: 0.05, max: 1, step: 0.05, value: WITHOUT_MASK, oninput: onchange });
    this.masking = [iconButton("brush", "Paint a mask", () => this.paintMask(), "Mask"),
      iconButton("trash", "Remove the mask", () => this.setMask(null), "No mask")];
    this.tools = h("div", { class: "row wrap" }, ...this.masking,
      h("span", { class: "grow" }),
      iconButton("close", "Remove the image", () => this.clear(), "Remove"));
    this.used = h("div", { class: "stack" }, this.shown, this.tools, this.strength.element);
    this.used.hidden = true;
    box.append(this.zone, this.used);
  }

  /** Take whether the model starts from the image, which may then have a mask; otherwise it reads it. */
  know(starts) {
    this.starts = starts;
    this.strength.element.hidden = !starts;
    for (const button of this.masking) button.hidden = !starts;
    if (!starts && this.mask !== null) this.setMask(null);
  }

  get isUsed() {
    return this.image !== null;
  }

  async give(blob) {
    await this.take(blob);
    this.ongiven(this.bitmap.width, this.bitmap.height);
  }

  async take(blob) {
    this.bitmap = await bitmapOf(blob);
    this.image = await base64Of(blob);
    this.mask = null;
    this.strength.write(WITHOUT_MASK);
    this.show();
  }

  clear() {
    Object.assign(this, { image: null, mask: null, bitmap: null });
    this.show();
    this.zone.querySelector("button").focus();
  }

  async paintMask() {
    const { width, height } = this.bitmap;
    const mask = await paint({ title: "A mask", width, height, background: this.bitmap, mask: true });
    if (mask) await this.setMask(mask);
  }

  async setMask(mask) {
    this.mask = mask === null ? null : await base64Of(mask);
    this.strength.write(mask === null ? WITHOUT_MASK : WITH_MASK);
    this.show();
  }

  show() {
    this.used.hidden = !this.isUsed;
    this.zone.hidden = this.isUsed;
    if (this.isUsed) {
      const layers = [picture(this.image, "the image to start from", "pixels")];
      if (this.mask !== null) layers.push(picture(this.mask, "what is to be made anew, in white", "pixels mask"));
      this.shown.replaceChildren(...layers);
    }
    this.onchange();
  }

  read() {
    if (!this.isUsed) return null;
    if (!this.starts) return { image: this.image };
    return { image: this.image, ...(this.mask === null ? {} : { mask: this.mask }), strength: this.strength.read() };
  }

  async write({ image, mask, strength }) {
    await this.take(blobOf(image));
    this.mask = mask ?? null;
    this.strength.write(strength ?? (mask ? WITH_MASK : WITHOUT_MASK));
    this.show();
  }
}

function picture(base64, alt, className) {
  const src = URL.createObjectURL(blobOf(base64));
  return h("img", { src, alt, class: className, onload: () => URL.revokeObjectURL(src) });
}
