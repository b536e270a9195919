// The prompt: completion of what a model knows, and a hint where it knows none of the words.
import { byId, h } from "./dom.js";

const SHOWN = 8;
const IDEAS = 5;

export class Prompt {
  /** `field`: the text area; its list and its hint are found by id. `onenter`: Ctrl+Enter was pressed. */
  constructor(field, onchange) {
    this.field = field;
    this.list = byId("completions");
    this.hint = byId("prompt-hint");
    this.ideas = byId("ideas");
    this.onchange = onchange;
    this.concepts = [];
    this.words = new Set();
    this.chosen = -1;
    field.addEventListener("input", () => { this.complete(); this.onchange(); });
    field.addEventListener("keydown", (event) => this.key(event));
    field.addEventListener("blur", () => { this.close(); this.judge(); });
    this.list.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // the field keeps the focus
      const option = event.target.closest("[role=option]");
      if (option) this.take(option.dataset.name);
    });
  }

  /** Take what the model knows; an empty list for a model that reads any text. */
  know(concepts) {
    this.concepts = concepts;
    this.words = new Set(concepts.flatMap((name) => name.toLowerCase().split(/[^a-z0-9]+/)).filter(Boolean));
    const shuffled = [...concepts].sort(() => Math.random() - 0.5).slice(0, IDEAS);
    this.ideas.replaceChildren(...shuffled.map((name) =>
      h("button", { type: "button", class: "idea", onclick: () => this.write(name) }, name)));
    this.ideas.hidden = concepts.length === 0;
    this.judge();
  }

  write(text) {
    this.field.value = text;
    this.judge();
    this.onchange();
  }

  /** Return the text after the last comma, which is what is being typed. */
  typed() {
    return this.field.value.slice(0, this.field.selectionStart).split(/[,\n]/).at(-1).trimStart().toLowerCase();
  }

  complete() {
    this.judge();
    const typed = this.typed();
    const found = typed.length < 1 ? [] : this.concepts.filter((name) => name.includes(typed) && name !== typed);
    found.sort((a, b) => Number(b.startsWith(typed)) - Number(a.startsWith(typed)) || a.length - b.length);
    this.show(found.slice(0, SHOWN), typed);
  }

  show(names, typed) {
    this.chosen = -1;
    this.list.replaceChildren(...names.map((name, i) => {
      const at = name.indexOf(typed);
      const text = [name.slice(0, at), h("b", {}, name.slice(at, at + typed.length)), name.slice(at + typed.length)];
      return h("li", { id: `completion-${i}`, role: "option", "aria-selected": "false", dataset: { name } }, ...text);
    }));
    this.list.hidden = names.length === 0;
    this.field.removeAttribute("aria-activedescendant");
  }

  close() {
    this.show([], "");
  }

  key(event) {
    const options = [...this.list.children];
    if (options.length === 0) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const move = event.key === "ArrowDown" ? 1 : -1;
      this.choose((this.chosen + move + options.length) % options.length);
    } else if ((event.key === "Enter" || event.key === "Tab") && this.chosen >= 0) {
      event.preventDefault();
      this.take(options[this.chosen].dataset.name);
    } else if (event.key === "Escape") {
      event.preventDefault();
      this.close();
    }
  }

  choose(index) {
    this.chosen = index;
    for (const [i, option] of [...this.list.children].entries()) {
      option.setAttribute("aria-selected", String(i === index));
      if (i === index) option.scrollIntoView({ block: "nearest" });
    }
    this.field.setAttribute("aria-activedescendant", `completion-${index}`);
  }

  take(name) {
    const { value, selectionStart: at } = this.field;
    const start = at - (value.slice(0, at).split(/[,\n]/).at(-1).trimStart().length);
    this.field.setRangeText(name, start, at, "end");
    this.close();
    this.judge();
    this.onchange();
  }

  /** Say so if the model knows none of the words. */
  judge() {
    const words = this.field.value.toLowerCase().split(/[^\p{L}\p{N}]+/u).filter(Boolean);
    const isLost = this.concepts.length > 0 && words.length > 0
      && !words.some((word, i) => this.words.has(word) || (i === words.length - 1 && this.isBegun(word)));
    const text = isLost
      ? `This model draws ${this.concepts.length} things, and none of these words names one. It would give a patch of colours.`
      : "";
    if (this.hint.textContent !== text) this.hint.textContent = text;
    this.hint.hidden = !isLost;
  }

  isBegun(word) {
    return document.activeElement === this.field && [...this.words].some((known) => known.startsWith(word));
  }
}
