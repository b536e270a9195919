// Starts the page: what the server has decides which parts are there.
import { getIfThere, getJson, onMissingKey } from "./api.js";
import { accept } from "./drop.js";
import { byId, say } from "./dom.js";
import { Form } from "./form.js";
import { Gallery } from "./gallery.js";
import { fieldsOf, parametersOf } from "./infotext.js";
import { askForKey, wireKeyButton } from "./key.js";
import { Rank } from "./rank.js";
import { start } from "./runs.js";
import { Status } from "./status.js";
import { wireTabs } from "./tabs.js";

const status = new Status();
let tiles = [];

async function boot() {
  onMissingKey(askForKey);
  wireKeyButton(() => location.reload());
  for (const form of document.querySelectorAll("dialog form")) form.addEventListener("submit", (event) => event.stopPropagation());
  const [models, words] = await Promise.all([getJson("v1/models"), getIfThere("v1/words")]);
  const known = Object.fromEntries((words?.data ?? []).map((each) => [each.id, each]));
  const base = models.data.filter(({ kind }) => kind === "base");
  const rankers = models.data.filter(({ kind }) => kind === "recommender");
  byId("tab-images").hidden = base.length === 0;
  byId("tab-rank").hidden = rankers.length === 0;
  const tabs = wireTabs({ status: (isShown) => status.show(isShown) });
  if (rankers.length) new Rank(rankers, known);
  if (base.length) await bootImages(base, known, tabs);
  tabs.start(base.length ? "images" : rankers.length ? "rank" : "status");
  document.body.dataset.ready = "true";
}

async function bootImages(models, words, tabs) {
  const [loras, controlnets] = await Promise.all([getIfThere("v1/loras"), getIfThere("v1/controlnets")]);
  const form = new Form(() => generate(form, gallery));
  form.know({ models, words, loras: loras?.data ?? [], controlnets: controlnets?.data ?? [] });
  const use = (work, text) => async (image) => {
    try {
      await work(image);
      say(text);
      byId("prompt").focus();
    } catch (error) {
      say(error.message, "error");
    }
  };
  const gallery = new Gallery({
    restore: use((image) => form.write(image.body), "the form has the settings of this image"),
    edit: use((image) => form.source.give(image.blob), "the next images start from this one"),
    control: controlnets?.data.length ? use((image) => form.controls.use(image.blob), "a ControlNet has this image") : null,
  });
  accept(document.body, (file) => restore(file, form, tabs));
  byId("restore").addEventListener("change", (event) => {
    if (event.target.files.length) restore(event.target.files[0], form, tabs);
    event.target.value = "";
  });
  await gallery.load();
  await form.restoreDraft();
}

async function generate(form, gallery) {
  const requests = form.requests();
  if (requests === null) return;
  tiles = [...tiles.filter(({ isOpen }) => isOpen), ...start(requests, (image, tile) => gallery.add(image, tile))];
  gallery.run(tiles);
  const behavior = matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth";
  if (matchMedia("(max-width: 60rem)").matches) byId("stage").scrollIntoView({ behavior, block: "start" });
  const button = byId("generate");
  button.classList.add("busy");
  const mine = tiles;
  await Promise.all(mine.map(({ ended }) => ended));
  if (mine === tiles) button.classList.remove("busy");
}

/** Put the settings that a PNG carries into the form. */
async function restore(file, form, tabs) {
  try {
    const text = await parametersOf(file);
    if (text === null) throw new Error("this PNG carries no settings");
    const { fields, lost } = fieldsOf(text, form.models, form.model);
    const unknown = await form.write(fields);
    tabs.start("images");
    const missing = [...lost, ...unknown];
    say(missing.length ? `restored, but for ${missing.join(" and ")}` : "the settings of that image are restored");
  } catch (error) {
    say(error.message, "error");
  }
}

boot().catch((error) => {
  say(error.message, "error");
  document.body.dataset.ready = "failed";
});
