// A place to drop an image on; it is a button, too, and takes what is pasted while it has the focus.
import { h, icon, say } from "./dom.js";
import { TAKEN } from "./bytes.js";

/** Make one. `ontake(blob)` may be async; what it throws is told. */
export function dropZone(label, ontake) {
  const input = h("input", { type: "file", accept: TAKEN.join(","), class: "hidden", tabIndex: -1, "aria-label": label });
  const take = async (blob) => {
    try {
      if (!TAKEN.includes(blob.type)) throw new Error("PNG, JPEG and WebP are taken");
      await ontake(blob);
    } catch (error) {
      say(error.message, "error");
    }
  };
  const zone = h("button", { type: "button", class: "drop", onclick: () => input.click() }, icon("image"), h("span", {}, label));
  input.addEventListener("change", () => { if (input.files.length) take(input.files[0]); input.value = ""; });
  accept(zone, take);
  zone.addEventListener("paste", (event) => {
    const file = [...event.clipboardData.files].at(0);
    if (file) { event.preventDefault(); take(file); }
  });
  return h("div", { class: "drop-box" }, zone, input);
}

/** Let an element take a dropped file. */
export function accept(element, take) {
  element.addEventListener("dragover", (event) => {
    if (![...event.dataTransfer.items].some((item) => item.kind === "file")) return;
    event.preventDefault();
    element.classList.add("over");
  });
  element.addEventListener("dragleave", () => element.classList.remove("over"));
  element.addEventListener("drop", (event) => {
    element.classList.remove("over");
    const file = event.dataTransfer.files[0];
    if (!file) return;
    event.preventDefault();
    event.stopPropagation();
    take(file);
  });
}
