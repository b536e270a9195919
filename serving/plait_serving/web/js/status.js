// The status tab: how the server is, read again every two seconds while somebody looks.
import { getJson, getNow } from "./api.js";
import { byId, h, sparkline } from "./dom.js";

const EVERY_MS = 2000;
const KEPT = 90;
const NAMES = {
  images: "images", image_pixels: "pixels", image_steps: "steps", image_compute_seconds: "compute seconds",
  image_requests_finished: "requests finished", image_requests_failed: "failed", image_requests_cancelled: "cancelled",
  image_requests_rejected: "rejected", rankings: "rankings", candidates: "candidates",
};

export class Status {
  constructor() {
    this.timer = null;
    this.waiting = [];
    this.tenants = [];
  }

  show(isShown) {
    clearInterval(this.timer);
    if (!isShown) return;
    this.timer = setInterval(() => this.refresh(), EVERY_MS);
    this.refresh();
  }

  async refresh() {
    try {
      // A busy engine may be late with its account: the table then stays as it was.
      const account = getNow("v1/usage").then(({ data }) => { this.tenants = data; }, () => {});
      const [status, models] = await Promise.all([getJson("v1/status"), getJson("v1/models"), account]);
      this.waiting = [...this.waiting, status.queue.waiting + status.queue.running].slice(-KEPT);
      this.render(status, models.data, this.tenants);
    } catch (error) {
      byId("status-cards").replaceChildren(card("Server", "no answer", error.message, "bad"));
    }
  }

  render(status, models, tenants) {
    const { queue, replicas, resident } = status;
    const peak = Math.max(4, ...this.waiting);
    const load = card("Queue", `${queue.waiting} waiting`, `${queue.running} running · ${queue.compute_s.toFixed(1)} s of compute ahead`);
    load.append(sparkline(this.waiting, { top: peak }));
    byId("status-cards").replaceChildren(
      card("Server", status.ready ? "ready" : "not ready", status.reason ?? `plait ${status.version}`, status.ready ? "good" : "bad"),
      load,
      card("Replicas", `${replicas.engine} engine${replicas.engine === 1 ? "" : "s"}`, `${replicas.ingress} for HTTP`),
      card("Made since the start", `${status.images_made} images`, `${status.rankings_made} rankings`),
      card("Models in memory", String(resident.models.length), `${(resident.model_bytes / 2 ** 30).toFixed(1)} GiB of weights`),
      card("Resident LoRAs", String(resident.loras), `${(resident.lora_bytes / 2 ** 20).toFixed(1)} MiB`),
      card("Compiled parts", String(resident.prepared.length), resident.prepared.join(", ") || "torch runs the model"));
    table("status-models", ["model", "kind", "family or mode", "about"], models.map((model) => [
      model.id, model.kind, model.mode ?? model.family,
      model.kind === "base" ? `${model.default_size}, ${model.dtype}` : `version ${model.version}, ${model.items ?? 0} items`,
    ]));
    const columns = Object.keys(NAMES).filter((name) => tenants.some((tenant) => tenant[name]));
    table("status-tenants", ["tenant", ...columns.map((name) => NAMES[name])], tenants.map((tenant) => [
      tenant.tenant, ...columns.map((name) => Number(tenant[name] ?? 0).toLocaleString("en", { maximumFractionDigits: 1 }))]));
  }
}

function card(name, value, note, mood = "") {
  return h("section", { class: `card figure-card ${mood}`, "aria-label": name },
    h("h2", {}, name), h("p", { class: "figure-value" }, value), h("p", { class: "hint" }, note));
}

function table(id, heads, rows) {
  byId(id).replaceChildren(
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), rest.map((cell) => h("td", {}, cell))))));
}
