// LoRAs as chips: a press puts one into the set, a slider says how much of it.
import { h, slider } from "./dom.js";

const MIN = -1;
const MAX = 2;

export class Loras {
  constructor(box, onchange) {
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "LoRAs" });
    this.scales = h("div", { class: "stack" });
    box.append(this.chips, this.scales);
    this.onchange = onchange;
    this.names = [];
    this.set = new Map(); // in the order in which they were chosen, which is the order of the set
  }

  know(names) {
    this.names = names;
    for (const name of [...this.set.keys()]) if (!names.includes(name)) this.remove(name);
    this.render();
  }

  render() {
    this.chips.replaceChildren(...this.names.map((name) => h("button", {
      type: "button", class: "chip", "aria-pressed": String(this.set.has(name)), onclick: () => this.toggle(name),
    }, name)));
  }

  toggle(name) {
    if (this.set.has(name)) this.remove(name);
    else this.add(name, 1);
    for (const chip of this.chips.children) chip.setAttribute("aria-pressed", String(this.set.has(chip.textContent)));
    this.onchange();
  }

  add(name, scale) {
    const made = slider({
      id: `lora-${name}`, label: name, min: MIN, max: MAX, step: 0.05, value: scale, oninput: this.onchange,
    });
    this.set.set(name, made);
    this.scales.append(made.element);
  }

  remove(name) {
    this.set.get(name)?.element.remove();
    this.set.delete(name);
  }

  read() {
    return [...this.set].map(([name, { read }]) => ({ name, scale: read() }));
  }

  /** Take a set; returns the names that the server does not have. */
  write(loras) {
    for (const name of [...this.set.keys()]) this.remove(name);
    const [known, lost] = [[], []];
    for (const lora of loras) (this.names.includes(lora.name) ? known : lost).push(lora);
    for (const { name, scale } of known) this.add(name, scale ?? 1);
    this.render();
    return lost.map(({ name }) => name);
  }
}
