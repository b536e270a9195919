// The ranking tab: a person is described, and the list follows at once; where its time went is drawn below.
import { postJson } from "./api.js";
import { byId, h, say } from "./dom.js";
import { History } from "./history.js";
import { RawRank } from "./raw_rank.js";

const WAIT_MS = 120;
const STAGES = ["queued_ms", "lookup_ms", "wire_ms", "dense_ms"];

export class Rank {
  constructor(models, words) {
    this.models = models;
    this.words = words;
    const select = byId("rank-model");
    select.replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    select.parentElement.hidden = models.length < 2;
    select.addEventListener("change", () => this.choose());
    byId("rank-form").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    this.items = new Map();
    this.timer = null;
    byId("tab-rank").addEventListener("click", () => this.choose(), { once: true });
    if (location.hash === "#rank") this.choose();
  }

  get model() {
    return this.models.find(({ id }) => id === byId("rank-model").value);
  }

  async choose() {
    const { model } = this;
    const meanings = this.words[model.id]?.inputs;
    const box = byId("rank-inputs");
    const isPlain = Boolean(meanings) && model.items > 0;
    byId("rank-results").replaceChildren();
    byId("rank-times").replaceChildren();
    const forWords = [byId("rank-top").parentElement, document.querySelector("#rank-form [type=submit]"), byId("rank-results").parentElement];
    for (const part of forWords) part.hidden = !isPlain;
    if (!isPlain) return box.replaceChildren(new RawRank(model).element);
    const inputs = model.inputs.filter(({ name, parameters }) =>
      parameters?.side === "user" && !name.endsWith("_offsets"));
    this.inputs = inputs.map(({ name, parameters }) => this.input(name, parameters.kind, meanings[name]));
    box.replaceChildren(...this.inputs.map(({ element }) => element));
    this.history?.load(model, await this.names(model));
    return this.ask();
  }

  async names(model) {
    if (this.items.has(model.id)) return this.items.get(model.id);
    const user = this.user(); // any user will do: the answer names all items
    try {
      const { items } = await postJson("v1/recommend", { model: model.id, user, candidates: "all" });
      this.items.set(model.id, items);
      return items;
    } catch (error) {
      say(error.message, "error");
      return []; // asked for again the next time that somebody looks
    }
  }

  input(name, kind, words) {
    const label = name.replaceAll("_", " ");
    if (!words && kind === "bag") {
      this.history = new History(label, () => this.soon());
      return { name, element: this.history.element, read: () => this.history.read() };
    }
    return kind === "bag" ? this.chips(name, label, words) : this.select(name, label, words);
  }

  chips(name, label, words) {
    const chips = words.map((word, i) => h("button", {
      type: "button", class: "chip", "aria-pressed": String(i === 1 || i === 10), dataset: { number: String(i) },
      onclick: ({ currentTarget: chip }) => {
        chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
        this.soon();
      },
    }, word));
    const element = h("div", { class: "field" }, h("span", { class: "label", id: `rank-${name}` }, label),
      h("div", { class: "chips", role: "group", "aria-labelledby": `rank-${name}` }, chips));
    const pressed = () => chips.filter((chip) => chip.getAttribute("aria-pressed") === "true");
    return { name, element, read: () => pressed().map((chip) => Number(chip.dataset.number)) };
  }

  select(name, label, words) {
    const select = h("select", { id: `rank-${name}`, onchange: () => this.soon() },
      words.map((word, i) => h("option", { value: String(i), selected: i === 2 }, word)));
    const element = h("div", { class: "field" }, h("label", { for: `rank-${name}` }, label), select);
    return { name, element, read: () => Number(select.value) };
  }

  user() {
    return Object.fromEntries(this.inputs.map(({ name, read }) => [name, read()]));
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), WAIT_MS);
  }

  async ask() {
    if (!this.inputs) return;
    const asked = this.asked = Symbol("the newest question");
    const sent_ms = performance.now();
    const body = { model: this.model.id, user: this.user(), candidates: "all", top_k: Number(byId("rank-top").value) || 10 };
    try {
      const answer = await postJson("v1/recommend", body);
      if (this.asked !== asked) return;
      this.render(answer.items);
      this.times(answer.timings, performance.now() - sent_ms);
    } catch (error) {
      say(error.message, "error");
    }
  }

  /** Show the list; what was in it already moves to its new place. */
  render(items) {
    const list = byId("rank-results");
    const before = new Map([...list.children].map((row) => [row.dataset.id, row]));
    const tops = new Map([...before].map(([id, row]) => [id, row.getBoundingClientRect().top]));
    const scores = items.map(({ score }) => score);
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    list.replaceChildren(...items.map(({ id, name, score }, i) => {
      const row = before.get(String(id)) ?? h("li", { dataset: { id: String(id) } },
        h("span", { class: "place" }), h("span", { class: "name" }, name ?? `item ${id}`),
        h("span", { class: "score" }), h("span", { class: "meter" }, h("span")));
      row.children[0].textContent = String(i + 1);
      row.children[2].textContent = score.toFixed(2);
      const share = high > low ? 0.15 + (0.85 * (score - low)) / (high - low) : 1;
      row.children[3].firstChild.style.setProperty("width", `${(share * 100).toFixed(1)}%`);
      return row;
    }));
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    for (const row of list.children) {
      const from = tops.get(row.dataset.id);
      const shift = from === undefined ? 12 : from - row.getBoundingClientRect().top;
      const frames = [{ transform: `translateY(${shift}px)`, opacity: from === undefined ? 0 : 1 }, { transform: "none", opacity: 1 }];
      if (shift) row.animate(frames, { duration: 260, easing: "cubic-bezier(.2,.7,.3,1)" });
    }
  }

  times(timings, seen_ms) {
    const stages = STAGES.filter((name) => name in timings);
    const inside = stages.reduce((sum, name) => sum + timings[name], 0) || 1;
    byId("rank-times").replaceChildren(
      h("div", { class: "stages", "aria-hidden": "true" }, stages.map((name, i) =>
        h("span", { class: `stage-${i}`, style: { "flex-grow": String(timings[name] / inside) } }))),
      h("ul", { class: "facts", "aria-label": "Where the time went" },
        stages.map((name, i) => h("li", {}, h("span", { class: `dot stage-${i}` }), `${name.slice(0, -3)} ${timings[name].toFixed(2)} ms`)),
        h("li", {}, `server ${timings.total_ms.toFixed(1)} ms`), h("li", {}, `seen here ${seen_ms.toFixed(1)} ms`)));
  }
}
