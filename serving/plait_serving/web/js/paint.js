// A canvas to paint a mask or a control map on: with a pointer, or with the arrow keys and the space bar.
import { byId, h, iconButton, slider } from "./dom.js";
import { canvasPng } from "./bytes.js";

const COLOURS = ["#ffffff", "#e03131", "#f08c00", "#ffd43b", "#2f9e44", "#1c7ed6", "#7048e8", "#a5673f", "#000000"];
const MAX_UNDO = 30;
const left = new Map(); // the paintings, by title, that were left without being used: they wait for the next time

/**
 * Let a person paint. `background`: shown below the paint; with `mask` the answer is white where there is paint and
 * black elsewhere, else it is the painting on black. Enter uses it, Escape leaves it for the next time. Resolves to a
 * PNG, or null.
 */
export function paint({ title, width, height, background = null, mask = false }) {
  return new Painter({ title, width, height, background, mask }).open();
}

class Painter {
  constructor({ title, width, height, background, mask }) {
    Object.assign(this, { title, width, height, background, mask });
    this.canvas = h("canvas", { width, height, tabIndex: 0, class: "painting" });
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-label",
      `${title}. Arrow keys move the brush, the space bar puts it down and lifts it.`);
    this.layer = h("canvas", { width, height });
    this.ink = this.layer.getContext("2d");
    this.colour = COLOURS[0];
    this.isErasing = false;
    this.undos = [];
    this.cursor = { x: width / 2, y: height / 2, down: false, shown: false };
    this.brush = slider({
      id: "brush-size", label: "Brush", min: 1, max: Math.max(8, Math.round(width / 3)), step: 1,
      value: mask ? Math.max(4, Math.round(width / 8)) : Math.max(2, Math.round(width / 64)), oninput: () => this.draw(),
    });
    this.dialog = byId("paint");
    this.dialog.replaceChildren(this.form(title));
    const last = left.get(title);
    if (last?.background === background) {
      this.remember();
      this.ink.drawImage(last.layer, 0, 0, width, height);
    }
    left.delete(title);
    this.listen();
    this.draw();
  }

  form(title) {
    const tools = h("div", { class: "row wrap" });
    if (!this.mask) tools.append(this.palette());
    this.eraser = h("button", {
      type: "button", class: "chip", "aria-pressed": "false", onclick: () => this.erase(!this.isErasing),
    }, "Eraser");
    tools.append(this.eraser, iconButton("undo", "Undo", () => this.undo(), "Undo"),
      iconButton("trash", "Clear", () => { this.remember(); this.ink.clearRect(0, 0, this.width, this.height); this.draw(); }, "Clear"));
    return h("form", { method: "dialog", class: "stack" },
      h("h2", { id: "paint-title" }, title),
      h("div", { class: "easel" }, this.canvas), this.brush.element, tools,
      h("p", { class: "hint" }, this.mask
        ? "Paint over what is to be made anew."
        : "Paint what the ControlNet is to see: black means nothing here."),
      h("div", { class: "row end" },
        h("button", { type: "button", class: "quiet", onclick: () => this.dialog.close() }, "Cancel"),
        h("button", { type: "submit", value: "use", class: "primary" }, "Use it")));
  }

  palette() {
    return h("div", { class: "swatches", role: "group", "aria-label": "Colour" }, COLOURS.map((colour, i) =>
      h("button", {
        type: "button", class: "swatch", "aria-pressed": String(i === 0), "aria-label": `colour ${i + 1}: ${colour}`,
        style: { "--colour": colour },
        onclick: (event) => {
          this.colour = colour;
          this.erase(false);
          for (const each of event.currentTarget.parentElement.children) each.setAttribute("aria-pressed", "false");
          event.currentTarget.setAttribute("aria-pressed", "true");
        },
      })));
  }

  open() {
    this.dialog.showModal();
    this.canvas.focus();
    return new Promise((resolve) => {
      this.dialog.addEventListener("close", () => {
        const isUsed = this.dialog.returnValue === "use";
        this.dialog.returnValue = "";
        if (!isUsed && this.undos.length) left.set(this.title, { layer: this.layer, background: this.background });
        resolve(isUsed ? this.result() : null);
      }, { once: true });
    });
  }

  listen() {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return {
        x: ((event.clientX - box.left) / box.width) * this.width,
        y: ((event.clientY - box.top) / box.height) * this.height,
      };
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.remember();
      this.cursor = { ...at(event), down: true, shown: false };
      this.stroke(this.cursor, this.cursor);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const next = at(event);
      if (this.cursor.down && event.buttons) this.stroke(this.cursor, next);
      this.cursor = { ...next, down: this.cursor.down && event.buttons > 0, shown: false };
    });
    this.canvas.addEventListener("pointerup", () => { this.cursor.down = false; });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const step = Math.max(1, this.width / 64) * (event.shiftKey ? 4 : 1);
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const move = moves[event.key];
    if (event.key === " ") {
      this.cursor.down = !this.cursor.down;
      if (this.cursor.down) { this.remember(); this.stroke(this.cursor, this.cursor); }
    } else if (event.key === "z" && (event.ctrlKey || event.metaKey)) {
      this.undo();
    } else if (event.key === "Enter") {
      this.dialog.querySelector("[value=use]").click();
    } else if (move) {
      const clamp = (value, top) => Math.min(top, Math.max(0, value));
      const next = { x: clamp(this.cursor.x + move[0] * step, this.width),
                     y: clamp(this.cursor.y + move[1] * step, this.height) };
      if (this.cursor.down) this.stroke(this.cursor, next);
      this.cursor = { ...this.cursor, ...next };
    } else return;
    event.preventDefault();
    this.cursor.shown = true;
    this.draw();
  }

  erase(isErasing) {
    this.isErasing = isErasing;
    this.eraser.setAttribute("aria-pressed", String(isErasing));
  }

  stroke(from, to) {
    this.ink.globalCompositeOperation = this.isErasing ? "destination-out" : "source-over";
    this.ink.strokeStyle = this.colour;
    this.ink.lineWidth = this.brush.read();
    this.ink.lineCap = "round";
    this.ink.beginPath();
    this.ink.moveTo(from.x, from.y);
    this.ink.lineTo(to.x + 0.01, to.y);
    this.ink.stroke();
    this.draw();
  }

  remember() {
    this.undos.push(this.ink.getImageData(0, 0, this.width, this.height));
    if (this.undos.length > MAX_UNDO) this.undos.shift();
  }

  undo() {
    const last = this.undos.pop();
    if (last) this.ink.putImageData(last, 0, 0);
    this.draw();
  }

  /** Show background, paint and, for who uses keys, the brush. */
  draw() {
    const view = this.canvas.getContext("2d");
    view.globalAlpha = 1;
    view.fillStyle = "#000";
    view.fillRect(0, 0, this.width, this.height);
    if (this.background) view.drawImage(this.background, 0, 0, this.width, this.height);
    view.globalAlpha = this.mask ? 0.65 : 1;
    view.drawImage(this.layer, 0, 0);
    if (!this.cursor.shown) return;
    view.globalAlpha = 1;
    view.strokeStyle = this.cursor.down ? "#e5603b" : "#5b5bd6";
    view.lineWidth = Math.max(1, this.width / 128);
    view.beginPath();
    view.arc(this.cursor.x, this.cursor.y, Math.max(2, this.brush.read() / 2), 0, 2 * Math.PI);
    view.stroke();
  }

  result() {
    const out = h("canvas", { width: this.width, height: this.height });
    const context = out.getContext("2d");
    context.fillStyle = "#000";
    context.fillRect(0, 0, this.width, this.height);
    context.drawImage(this.layer, 0, 0);
    return canvasPng(out);
  }
}
