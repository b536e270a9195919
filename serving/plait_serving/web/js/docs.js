// The interactive documentation. Swagger UI is part of the package; the key of the page is sent along.
import { KEY } from "./names.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function shade() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

shade();
dark.addEventListener("change", shade);
globalThis.SwaggerUIBundle({
  url: "openapi.json",
  domNode: document.getElementById("swagger"),
  deepLinking: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  requestInterceptor(request) {
    const key = sessionStorage.getItem(KEY);
    if (key !== null && request.headers.Authorization === undefined) {
      request.headers.Authorization = `Bearer ${key}`;
    }
    return request;
  },
});
