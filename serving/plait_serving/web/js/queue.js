// Asks how many requests wait, for as long as some of ours have not begun: one question for all of them.
import { getNow } from "./api.js";

const EVERY_MS = 1500;

const waiting = new Set();
let timer = null;

/** Tell `tile.tellQueue` how many wait, until `unwatch`. */
export function watch(tile) {
  waiting.add(tile);
  timer ??= setInterval(ask, EVERY_MS);
}

export function unwatch(tile) {
  waiting.delete(tile);
  if (waiting.size > 0) return;
  clearInterval(timer);
  timer = null;
}

async function ask() {
  try {
    const { queue } = await getNow("v1/status");
    for (const tile of waiting) tile.tellQueue(queue.waiting);
  } catch {
    // the requests themselves will say what is wrong
  }
}
