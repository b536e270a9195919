// What a person saw before: items by name, found by typing.
import { h, icon } from "./dom.js";

export class History {
  constructor(label, onchange) {
    this.onchange = onchange;
    this.ids = [];
    this.names = new Map();
    this.options = h("datalist", { id: "items" });
    this.field = h("input", { id: "rank-history", placeholder: "type a title", autocomplete: "off" });
    this.field.setAttribute("list", "items");
    this.field.addEventListener("input", () => this.typed());
    this.field.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); this.typed(true); } });
    this.chips = h("ul", { class: "chips", "aria-label": label });
    this.element = h("div", { class: "field" }, h("label", { for: "rank-history" }, label), this.field, this.options, this.chips);
  }

  /** Take the items that a model knows, the best first; a few of them are the first history. */
  load(model, items) {
    this.names = new Map(items.map(({ id, name }) => [id, name ?? `item ${id}`]));
    this.byName = new Map([...this.names].map(([id, name]) => [name.toLowerCase(), id]));
    this.options.replaceChildren(...[...this.names.values()].sort().map((name) => h("option", { value: name })));
    this.ids = items.slice(0, 3).map(({ id }) => id);
    this.render();
  }

  /** Take the item that was typed or chosen; with `isSure` the first whose name contains it. */
  typed(isSure = false) {
    const text = this.field.value.trim().toLowerCase();
    const near = isSure && text ? [...this.byName.keys()].find((name) => name.includes(text)) : undefined;
    const id = this.byName?.get(text) ?? this.byName?.get(near);
    if (id === undefined) return;
    this.field.value = "";
    if (!this.ids.includes(id)) this.ids.push(id);
    this.render();
    this.onchange();
  }

  remove(id) {
    this.ids = this.ids.filter((each) => each !== id);
    this.render();
    this.field.focus();
    this.onchange();
  }

  render() {
    this.chips.replaceChildren(...this.ids.map((id) => h("li", {}, h("button", {
      type: "button", class: "chip removable", "aria-label": `remove ${this.names.get(id)}`, onclick: () => this.remove(id),
    }, h("span", {}, this.names.get(id)), icon("close")))));
  }

  read() {
    return this.ids;
  }
}
