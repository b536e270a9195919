// Asks for the key of a server that wants one.
import { hasKey, keepKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** Ask once, however many requests wait for it; null if the person gives none. */
export function askForKey(message) {
  asking ??= ask(message).finally(() => { asking = null; });
  return asking;
}

function ask(message) {
  const dialog = byId("key-dialog");
  byId("key-why").textContent = message ?? "";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "use" ? byId("key").value.trim() : "";
      dialog.returnValue = "";
      if (key) keepKey(key);
      resolve(key || null);
    }, { once: true });
  });
}

/** Wire the button that changes or forgets the key. `onchange` is called with a new one. */
export function wireKeyButton(onchange) {
  byId("key-forget").addEventListener("click", () => { keepKey(null); byId("key-dialog").close(); location.reload(); });
  byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
  byId("key-button").addEventListener("click", async () => {
    byId("key-forget").hidden = !hasKey();
    if ((await askForKey("A server that asks for keys takes this one with every request.")) !== null) onchange();
  });
}
