// Between base64, blobs and data URLs. `fetch` of a data URL is forbidden by the page's policy.

export const MIME = { png: "image/png", jpeg: "image/jpeg", webp: "image/webp" };

export function blobOf(base64, type = "image/png") {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
  return new Blob([bytes], { type });
}

/** Return a blob's bytes in base64. */
export function base64Of(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

/** Decode an image; throws a sentence if it is none. */
export async function bitmapOf(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    throw new Error("that file is no image that this browser can read");
  }
}

export function canvasPng(canvas) {
  return new Promise((resolve) => { canvas.toBlob(resolve, "image/png"); });
}

export const TAKEN = ["image/png", "image/jpeg", "image/webp"];
