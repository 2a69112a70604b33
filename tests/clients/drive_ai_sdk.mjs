// `node drive_ai_sdk.mjs URL`: what the AI SDK must find through `@ai-sdk/openai-compatible`.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, jsonSchema, Output, streamText, tool } from "ai";

const id = "smollm2-135m-instruct";
const noria = createOpenAICompatible({
  name: "noria",
  baseURL: `${process.argv[2]}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = noria.chatModel(id);
const asked = { model, prompt: "What is the capital of France?", temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const schema = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, big: { type: "boolean" } },
  required: ["city", "big"],
  additionalProperties: false,
});

async function texts() {
  const whole = await generateText(asked);
  assert.match(whole.text, /Paris/);
  const streamed = streamText(asked);
  const pieces = [];
  for await (const piece of streamed.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), whole.text);
  assert.ok(pieces.length > 3);
  assert.equal(await streamed.finishReason, whole.finishReason);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
  const completion = await generateText({ ...asked, model: noria.completionModel(id), prompt: "The capital of France is" });
  assert.match(completion.text, /Paris/);
}

async function objectsAndTools() {
  const long = { ...asked, maxOutputTokens: 80 };
  const { output } = await generateText({ ...long, output: Output.object({ schema }) });
  assert.equal(typeof output.big, "boolean");
  const tools = { lookUp: tool({ description: "Looks a city up.", inputSchema: schema }) };
  const whole = await generateText({ ...long, tools, toolChoice: "required" });
  assert.equal(whole.toolCalls[0].toolName, "lookUp");
  const streamed = streamText({ ...long, tools, toolChoice: { type: "tool", toolName: "lookUp" } });
  const calls = await streamed.toolCalls;
  assert.deepEqual(Object.keys(calls[0].input).sort(), ["big", "city"]);
}

async function vectorsAndErrors() {
  const { embeddings } = await embedMany({ model: noria.embeddingModel(id), values: ["a river", "a mountain"] });
  assert.equal(embeddings.length, 2);
  await assert.rejects(generateText({ ...asked, temperature: 3 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /temperature/);
    return true;
  });
  const parts = [];
  const failing = streamText({ ...asked, temperature: 3, onError: () => {} });
  for await (const part of failing.fullStream) parts.push(part.type);
  assert.ok(parts.includes("error"));
}

const version = (name) => JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
await texts();
await objectsAndTools();
await vectorsAndErrors();
console.log(`${version("@ai-sdk/openai-compatible")}, ai ${version("ai")}, Node ${process.versions.node}`);
