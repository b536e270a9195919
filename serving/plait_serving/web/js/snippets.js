// A request as a command or a program that makes the same image again. A key is never part of it.
import { BASE, hasKey } from "./api.js";

const OPENAI = ["prompt", "model", "n", "size", "output_format", "response_format"];

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** Take the images out of a body: they become files beside the program. */
function apart(body) {
  const files = [];
  const controlnets = body.controlnets?.map((control, i) => {
    const file = `control-${i + 1}.png`;
    files.push({ file, base64: control.image });
    return { ...control, image: file };
  });
  const rest = { ...body, response_format: "b64_json" }; // whatever the server's own is
  delete rest.stream;
  delete rest.partial_images;
  for (const name of ["image", "mask"]) {
    if (rest[name] === undefined) continue;
    files.push({ file: `${name}.png`, base64: rest[name] });
    rest[name] = `${name}.png`;
  }
  return { body: controlnets ? { ...rest, controlnets } : rest, files };
}

function heading(files) {
  return files.length ? [`# beside it: ${files.map(({ file }) => file).join(", ")}`] : [];
}

export function asCurl(path, body) {
  const { body: plain, files } = apart(body);
  let json = quoted(JSON.stringify(plain, null, 1));
  for (const { file } of files) json = json.replace(`"${file}"`, `"'"$(base64 -w0 ${file})"'"`);
  const key = hasKey() ? ` -H "authorization: Bearer $PLAIT_KEY"` : "";
  const url = new URL(path, BASE);
  return [
    ...heading(files),
    `printf %s ${json} |`, // which is part of the shell: a program's argument is too short for an image
    `curl -s ${quoted(String(url))}${key} -H 'content-type: application/json' -d @- > answer.json`,
  ].join("\n");
}

export function asPython(path, body) {
  const { body: plain, files } = apart(body);
  const isEdit = path.endsWith("/edits");
  const own = new Set([...OPENAI, "image", "mask"]);
  const extra = Object.fromEntries(Object.entries(plain).filter(([name]) => !own.has(name)));
  const given = Object.entries(plain).filter(([name]) => OPENAI.includes(name));
  const lines = given.map(([name, value]) => `    ${name}=${python(value)},`);
  for (const name of ["image", "mask"]) if (plain[name]) lines.unshift(`    ${name}=open("${name}.png", "rb"),`);
  lines.push(`    extra_body=${python(extra).replaceAll(/"(control-\d+\.png)"/g, 'b64("$1")')},`);
  const hasControls = files.some(({ file }) => file.startsWith("control"));
  const reader = ["", "", "def b64(path):", '    return base64.b64encode(open(path, "rb").read()).decode()', "", ""];
  return [
    ...heading(files),
    "import base64", ...(hasKey() ? ["import os"] : []), "", "from openai import OpenAI", ...(hasControls ? reader : [""]),
    `client = OpenAI(base_url=${python(String(new URL("v1", BASE)))}, api_key=${hasKey() ? 'os.environ["PLAIT_KEY"]' : '"none"'})`,
    `answer = client.images.${isEdit ? "edit" : "generate"}(`, ...lines, ")",
    `with open("image.${plain.output_format ?? "png"}", "wb") as file:`,
    "    file.write(base64.b64decode(answer.data[0].b64_json))",
  ].join("\n");
}

/** Return a JSON value as a Python literal. */
function python(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
}
