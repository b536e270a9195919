// A server in another language: `workers` slots, each of which a request holds for 100 ms; others wait, with `queue` and
// as long as there are not more than `queue-length` of them. GET /health is ready, /work waits for a slot.
import http from "node:http";
import { parseArgs } from "node:util";

const { values } = parseArgs({
  options: {
    port: { type: "string" },
    workers: { type: "string" },
    queue: { type: "boolean" },
    "no-queue": { type: "boolean" },
    "queue-length": { type: "string" },
  },
});
const workers = Number(values.workers);
const most = values["no-queue"] ? 0 : Number(values["queue-length"] ?? Infinity);
const waiting = [];
let busy = 0;

function begin(response) {
  busy += 1;
  setTimeout(() => {
    response.end("done");
    busy -= 1;
    if (waiting.length) begin(waiting.shift());
  }, 100);
}

http
  .createServer((request, response) => {
    if (request.url === "/health") response.end("ok");
    else if (busy < workers) begin(response);
    else if (waiting.length < most) waiting.push(response);
    else response.writeHead(503).end();
  })
  .listen(Number(values.port), "127.0.0.1");
