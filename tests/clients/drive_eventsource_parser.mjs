// `node drive_eventsource_parser.mjs URL`: every stream through `eventsource-parser`, which must find no error in it.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createParser } from "eventsource-parser";
import { EventSourceParserStream } from "eventsource-parser/stream";

const url = process.argv[2];
const body = { model: "smollm2-135m-instruct", temperature: 0, max_tokens: 12, stream: true };
const messages = [{ role: "user", content: "What is the capital of France?" }];

async function read(path, json) {
  const options = json && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(json) };
  const response = await fetch(url + path, options);
  assert.equal(response.status, 200);
  const events = [];
  const stream = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(new EventSourceParserStream({ onError: "terminate" }));
  for await (const event of stream) events.push(event);
  return events;
}

const native = await read("/generate_stream", { prompt: "The river", temperature: 0, max_tokens: 12 });
assert.equal(native.at(-1).data, "[DONE]");
const text = native.slice(0, -1).map((event) => JSON.parse(event.data).token).join("");
const named = await read("/generate_stream?prompt=The%20river&temperature=0&max_tokens=12");
assert.equal(named.map((event) => JSON.parse(event.data).token).join(""), text);
assert.equal(named.at(-1).event, "done");
assert.ok(Number(named.at(-1).id) >= 12);
for (const [path, asked] of [["/v1/completions", { prompt: "The river" }], ["/v1/chat/completions", { messages }]]) {
  const events = await read(path, { ...body, ...asked });
  assert.equal(events.at(-1).data, "[DONE]");
  for (const event of events.slice(0, -1)) assert.equal(JSON.parse(event.data).choices.length, 1);
}
for (const [path, asked, last] of [
  ["/v1/messages", { messages }, "message_stop"],
  ["/v1/responses", { input: "Hello", max_tokens: undefined, max_output_tokens: 5 }, "response.incomplete"],
]) {
  const events = await read(path, { ...body, ...asked });
  assert.equal(events.at(-1).event, last);
  for (const event of events) assert.equal(JSON.parse(event.data).type, event.event);
}
const errors = [];
const parser = createParser({ onEvent: () => {}, onError: (error) => errors.push(error) });
const bytes = await (await fetch(`${url}/generate_stream`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ prompt: "A", max_tokens: 3 }) })).text();
for (const character of bytes) parser.feed(character);
assert.deepEqual(errors, []);
const found = JSON.parse(readFileSync(new URL("node_modules/eventsource-parser/package.json", import.meta.url)));
console.log(`${found.version}, Node ${process.versions.node}`);
