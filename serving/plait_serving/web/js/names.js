// Names under which the browser keeps things.
export const KEY = "plait.key";
export const DRAFT = "plait.draft";
export const DATABASE = "plait";
