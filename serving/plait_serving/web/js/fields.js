// Controls of the fields that the server says belong on the page (a model's `controls`).
import { h, slider } from "./dom.js";

const OWN = "the model's own";

export class Fields {
  constructor(box, onchange) {
    this.box = box;
    this.onchange = onchange;
    this.made = [];
  }

  /** Draw the controls; what is the same field keeps its value. */
  know(controls) {
    const kept = this.read();
    this.made = controls.map((field) => ({ ...field, ...this.control(field) }));
    this.box.replaceChildren(...this.made.map(({ element }) => element));
    this.write(kept);
  }

  control({ name, label, schema, default: value }) {
    const id = `field-${name}`;
    if (schema.type === "boolean") {
      const box = h("input", { type: "checkbox", id, onchange: this.onchange });
      return { element: h("label", { class: "check", for: id }, box, label), read: () => box.checked,
        write: (next) => { box.checked = Boolean(next); } };
    }
    if (schema.type === "string") {
      const box = schema.enum
        ? h("select", { id, onchange: this.onchange }, ...(value === null ? [h("option", { value: "" }, OWN)] : []),
          schema.enum.map((each) => h("option", { value: each }, each)))
        : h("input", { id, autocomplete: "off" });
      return { element: h("div", { class: "field" }, h("label", { for: id }, label), box), read: () => box.value || null,
        write: (next) => { box.value = next ?? ""; } };
    }
    if (value === null) {
      const box = h("input", { type: "number", id, min: schema.minimum, max: schema.maximum, placeholder: OWN, oninput: this.onchange });
      return { element: h("div", { class: "field" }, h("label", { for: id }, label), box),
        read: () => (box.value === "" ? null : Number(box.value)), write: (next) => { box.value = next ?? ""; } };
    }
    const step = schema.type === "integer" ? 1 : 0.05;
    return slider({ id, label, min: schema.minimum ?? 0, max: schema.maximum ?? 100, step, value, oninput: this.onchange });
  }

  /** Return the fields that are not as they are by default. */
  read() {
    const values = this.made.map(({ name, read, default: unset }) => [name, read(), unset]);
    return Object.fromEntries(values.filter(([, value, unset]) => value !== unset));
  }

  write(fields) {
    for (const { name, write, default: unset } of this.made) write(fields[name] ?? unset);
  }
}
