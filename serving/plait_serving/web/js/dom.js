// Elements without markup in strings: text stays text, whatever is in it.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `props`: `class`, `dataset`, `style`, `on<event>`, properties that it has, else attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

const ICONS = {
  close: "M6 6l12 12M18 6L6 18",
  brush: "M4 20c3 0 4-1 4.500-3.500M9 15L19 5a1.800 1.800 0 0 1 2.500 2.500L11.500 17.500a2.600 2.600 0 1 1-2.500-2.500z",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M9 9h.01",
  download: "M12 4v11m0 0l-4-4m4 4l4-4M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  undo: "M9 7L5 11l4 4M5 11h9a5 5 0 0 1 0 10h-3",
  restore: "M4 12a8 8 0 1 0 3-6.200M4 4v4h4",
  layers: "M12 4l8 4-8 4-8-4zM4 12l8 4 8-4M4 16l8 4 8-4",
  plus: "M12 5v14M5 12h14",
  stop: "M7 7h10v10H7z",
};

/** Make an icon of 24 units; the button around it has the words. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** Make a polyline of `values` in a box of `width` x `height` units, its top at `top`. */
export function sparkline(values, { width = 240, height = 48, top = 1 } = {}) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", "sparkline");
  svg.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  const step = width / Math.max(1, values.length - 1);
  const y = (value) => height - 2 - (Math.min(value, top) / top) * (height - 4);
  line.setAttribute("points", values.map((value, i) => `${(i * step).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  svg.append(line);
  return svg;
}

/** Make a button with an icon; without `label` shown, `title` is what it is called. */
export function iconButton(name, title, onclick, label = null) {
  const shown = label === null ? [] : [h("span", {}, label)];
  const className = label === null ? "quiet square" : "quiet";
  const props = { type: "button", class: className, title, onclick };
  if (label === null) props["aria-label"] = title;
  return h("button", props, icon(name), ...shown);
}

/** Tell something to everybody: shown for a while, and read aloud. `kind` "aloud": what can be seen anyway. */
export function say(text, kind = "info") {
  const box = byId("messages");
  if (kind !== "aloud" && [...box.children].some(({ textContent }) => textContent === text)) return; // once for many
  const note = h("p", { class: kind === "aloud" ? "visually-hidden" : `note ${kind}` }, text);
  box.append(note);
  setTimeout(() => note.remove(), (kind === "error" ? 12000 : 4000) + 50 * text.length);
}

/** Make a slider with a number beside it that show one value. Returns the element; `read()` and `write(value)`. */
export function slider({ id, label, min, max, step, value, oninput = () => {} }) {
  const range = h("input", { type: "range", min, max, step, value, "aria-label": `${label}, slider` });
  const number = h("input", { type: "number", id, min, max, step, value, inputMode: "decimal" });
  const fill = () => {
    const share = (Number(range.value) - Number(range.min)) / (Number(range.max) - Number(range.min) || 1);
    range.style.setProperty("--share", `${(share * 100).toFixed(1)}%`);
  };
  range.addEventListener("input", () => { number.value = range.value; fill(); oninput(Number(range.value)); });
  number.addEventListener("input", () => { range.value = number.value; fill(); oninput(Number(number.value)); });
  const element = h("div", { class: "slider" }, h("label", { for: id }, label), number, range);
  const write = (next) => { number.value = next; range.value = next; fill(); };
  const bound = (bounds) => { for (const input of [range, number]) Object.assign(input, bounds); fill(); };
  fill();
  return { element, read: () => Number(number.value), write, bound };
}
