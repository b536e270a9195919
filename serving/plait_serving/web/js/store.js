// The gallery's memory: images with their settings, in the browser's IndexedDB. Nothing leaves the machine.
import { DATABASE } from "./names.js";

const IMAGES = "images";
const MAX_IMAGES = 400;

let opened = null;

function open() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(IMAGES, { keyPath: "id", autoIncrement: true });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function ask(mode, work) {
  const database = await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(IMAGES, mode);
    const asked = work(transaction.objectStore(IMAGES));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onabort = () => reject(transaction.error);
    transaction.onerror = () => reject(transaction.error);
  });
}

/** Keep an image; the oldest go where there are too many. Returns its id. */
export async function keep(image) {
  const id = await ask("readwrite", (images) => images.add(image));
  const keys = await ask("readonly", (images) => images.getAllKeys());
  for (const old of keys.slice(0, Math.max(0, keys.length - MAX_IMAGES))) await forget(old);
  return id;
}

/** Return all images, the newest first. */
export async function kept() {
  return (await ask("readonly", (images) => images.getAll())).reverse();
}

export function forget(id) {
  return ask("readwrite", (images) => images.delete(id));
}

export function forgetAll() {
  return ask("readwrite", (images) => images.clear());
}
