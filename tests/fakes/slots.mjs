// A server in another language: `workers` slots, each of which a request holds for `hold-ms`. By arguments, or by the
// environment. GET /health is ready; GET /work waits for a slot.
import http from "node:http";
import { parseArgs } from "node:util";

const { values } = parseArgs({
  options: {
    port: { type: "string" },
    workers: { type: "string", default: process.env.WORKERS ?? "1" },
    "hold-ms": { type: "string", default: "100" },
    queue: { type: "boolean", default: true },
    "no-queue": { type: "boolean", default: false },
  },
});
const [workers, holdMs] = [Number(values.workers), Number(values["hold-ms"])];
if (!(workers >= 1)) {
  console.error(`workers is ${values.workers}`);
  process.exit(3);
}
const waiting = [];
let busy = 0;

function begin(response) {
  busy += 1;
  setTimeout(() => {
    response.end("done");
    busy -= 1;
    if (waiting.length) begin(waiting.shift());
  }, holdMs);
}

http
  .createServer((request, response) => {
    if (request.url === "/health") response.end("ok");
    else if (busy < workers) begin(response);
    else if (values["no-queue"]) response.writeHead(503).end();
    else waiting.push(response);
  })
  .listen(Number(values.port), "127.0.0.1");
