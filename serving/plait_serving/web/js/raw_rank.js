// A model whose inputs have no words: its example is shown as the request that it is, and can be changed.
import { getJson, postJson } from "./api.js";
import { h, say } from "./dom.js";

export class RawRank {
  constructor(model) {
    this.model = model;
    this.text = h("textarea", { id: "rank-raw", rows: 14, spellcheck: false, class: "code" });
    this.answer = h("pre", { class: "code", tabIndex: 0, role: "region", "aria-label": "The answer" });
    this.element = h("div", { class: "stack" },
      h("label", { for: "rank-raw" }, `A request for ${model.id} (Open Inference Protocol)`), this.text,
      h("button", { type: "button", class: "primary", onclick: () => this.ask() }, "Rank"), this.answer);
    this.load();
  }

  async load() {
    try {
      this.text.value = JSON.stringify(await getJson(`v2/models/${encodeURIComponent(this.model.id)}/example?candidates=8`), null, 1);
    } catch (error) {
      say(error.message, "error");
    }
  }

  async ask() {
    try {
      const answer = await postJson(`v2/models/${encodeURIComponent(this.model.id)}/infer`, this.text.value);
      this.answer.textContent = JSON.stringify(answer, null, 1);
    } catch (error) {
      say(error.message, "error");
    }
  }
}
