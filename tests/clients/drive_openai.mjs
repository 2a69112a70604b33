// `node drive_openai.mjs URL`: what the `openai` package of npm must find.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const model = "smollm2-135m-instruct";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const chat = { model, messages, temperature: 0, max_tokens: 24 };
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const schema = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, big: { type: "boolean" } },
  required: ["city", "big"],
  additionalProperties: false,
};

async function chats() {
  const whole = await client.chat.completions.create(chat);
  assert.match(whole.choices[0].message.content, /Paris/);
  const usage = { stream: true, stream_options: { include_usage: true } };
  const texts = [];
  let counted;
  for await (const chunk of await client.chat.completions.create({ ...chat, ...usage })) {
    if (chunk.choices.length) texts.push(chunk.choices[0].delta.content ?? "");
    counted = chunk.usage ?? counted;
  }
  assert.equal(texts.join(""), whole.choices[0].message.content);
  assert.ok(texts.length > 3);
  assert.equal(counted.completion_tokens, whole.usage.completion_tokens);
  const helper = client.chat.completions.stream(chat);
  assert.equal(await helper.finalContent(), whole.choices[0].message.content);
}

async function structuredAndTools() {
  const tool = { type: "function", function: { name: "look_up", parameters: schema } };
  const asked = { ...chat, max_tokens: 80, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const whole = await client.chat.completions.create(asked);
  assert.equal(whole.choices[0].finish_reason, "tool_calls");
  const [call] = whole.choices[0].message.tool_calls;
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ["big", "city"]);
  const streamed = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
  const parsed = await client.chat.completions.parse({ ...chat, max_tokens: 80, response_format: format });
  assert.equal(typeof parsed.choices[0].message.parsed.big, "boolean");
}

async function otherRoutes() {
  const text = await client.completions.create({ model, prompt: "The capital of France is", temperature: 0, max_tokens: 8 });
  assert.match(text.choices[0].text, /Paris/);
  assert.equal((await client.models.list()).data[0].id, model);
  assert.equal((await client.models.retrieve(model)).id, model);
  const vectors = await client.embeddings.create({ model, input: ["a river", "a mountain"] });
  assert.equal(vectors.data.length, 2);
  const length = vectors.data[0].embedding.reduce((sum, x) => sum + x * x, 0);
  assert.ok(Math.abs(length - 1) < 1e-3, `a vector of length ${length}`);
  const asked = { model, input: messages[0].content, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(asked);
  let joined = "";
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    if (event.type === "response.output_text.delta") joined += event.delta;
  }
  assert.equal(joined, whole.output_text);
}

async function errorsAndAborts() {
  for (const stream of [false, true]) {
    const call = (changes) => client.chat.completions.create({ ...chat, ...changes, stream });
    await assert.rejects(call({ model: "other" }), OpenAI.NotFoundError);
    await assert.rejects(call({ temperature: 3 }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  }
  const stream = await client.chat.completions.create({ ...chat, max_tokens: 4000, stream: true });
  let count = 0;
  for await (const _ of stream) if (++count === 3) break; // which aborts the request
  assert.ok(stream.controller.signal.aborted);
}

await chats();
await structuredAndTools();
await otherRoutes();
await errorsAndAborts();
const found = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
console.log(`${found.version}, Node ${process.versions.node}`);
