// The interactive documentation. Swagger UI is part of the package; the key of the page is sent along.
import { KEY } from "./names.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function shade() {
  document.documentElement.classList.toggle("dark-mode", dark.matches);
}

// A field of a form that has no example would be sent with whatever its type allows.
function withoutMadeUpFields(text) {
  const api = JSON.parse(text);
  const forms = Object.values(api.paths)
    .flatMap((path) => Object.values(path))
    .map((operation) => operation.requestBody?.content["multipart/form-data"]?.schema);
  for (const { properties, required } of forms.filter((form) => form !== undefined)) {
    for (const [name, field] of Object.entries(properties)) {
      const isList = (field.anyOf ?? [field]).some(({ type }) => type === "array");
      if (!required.includes(name) && field.format !== "binary") field.example = isList ? [] : "";
    }
  }
  return JSON.stringify(api);
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
  responseInterceptor(response) {
    if (response.ok && response.url.endsWith("/openapi.json")) response.text = withoutMadeUpFields(response.text);
    return response;
  },
});
