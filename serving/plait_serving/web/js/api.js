// All requests to the server. A key, where the server wants one, is kept until the tab is closed.
import { KEY } from "./names.js";

export const BASE = new URL(".", document.baseURI);

const MAX_TRIES = 12;

export class ApiError extends Error {
  constructor(status, detail) {
    super(detail.message);
    this.status = status;
    this.param = detail.param ?? null;
    this.code = detail.code ?? null;
  }
}

let askForKey = async () => null;

/** Say how a key is asked for: `ask(message)` gives one, or null. */
export function onMissingKey(ask) {
  askForKey = ask;
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/**
 * Fetch a path; asks for a key where one is missing, and comes back as told where a tenant asks too often: the page
 * itself asks several things at once. Throws `ApiError`.
 */
export async function request(path, options = {}, tries = MAX_TRIES) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(new URL(path, BASE), { ...options, headers, credentials: "omit" }).catch(silent);
  if (answer.ok) return answer;
  const error = new ApiError(answer.status, await detailOf(answer));
  if (error.code === "rate_limited" && tries > 1) {
    const wait_s = Number(answer.headers.get("retry-after") ?? 1) + 2 * Math.random(); // not all at once again
    await new Promise((resolve) => { setTimeout(resolve, 1000 * wait_s); });
    return request(path, options, tries - 1);
  }
  if (answer.status === 401 && sessionStorage.getItem(KEY) !== key) return request(path, options); // given meanwhile
  if (answer.status === 401 && (await askForKey(error.message)) !== null) return request(path, options);
  throw error;
}

function silent(error) {
  throw error.name === "AbortError" ? error : new ApiError(0, { message: "the server does not answer" });
}

async function detailOf(answer) {
  try {
    const { error } = await answer.json();
    return typeof error === "string" ? { message: error } : error;
  } catch {
    return { message: `the server answered ${answer.status}` };
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

/** Post a body, or the text of one, whose numbers may have more digits than JavaScript's. */
export async function postJson(path, body, options = {}) {
  const headers = { "content-type": "application/json" };
  const text = typeof body === "string" ? body : JSON.stringify(body);
  return (await request(path, { method: "POST", body: text, headers, ...options })).json();
}

/** Like `getJson`, for what can be asked again later: gives up at once. */
export async function getNow(path) {
  return (await request(path, {}, 1)).json();
}

/** Like `getJson`; null where the server has no such route. */
export async function getIfThere(path) {
  try {
    return await getJson(path);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

/**
 * Post a body with `stream: true` and yield `{accepted}`, then `{step, steps}`, `{preview}` and, last, `{done}`. Throws
 * `ApiError`.
 */
export async function* stream(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await request(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  yield { accepted: true };
  for await (const block of blocks(answer.body)) {
    const event = understood(block);
    if (event !== null) yield event;
  }
}

async function* blocks(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let parts = [];
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(silent);
      if (done) return;
      parts.push(value);
      if (!value.includes("\n")) continue; // an image comes in many pieces: joined once
      const found = parts.join("").split("\n\n");
      parts = [found.pop()];
      yield* found;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function understood(block) {
  const progress = /^: step (\d+)\/(\d+)/.exec(block);
  if (progress) return { step: Number(progress[1]), steps: Number(progress[2]) };
  const data = block.split("\n").find((line) => line.startsWith("data: "));
  if (data === undefined) return null;
  const event = JSON.parse(data.slice(6));
  if (event.error) throw new ApiError(500, event.error);
  return event.type.endsWith(".partial_image") ? { preview: event } : { done: event };
}
