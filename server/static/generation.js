// One answer: what is sent for it, and what is measured while it streams.

import { chat } from "./api.js";
import { contentOf } from "./store.js";

const SAMPLING = [
  "model",
  "temperature",
  "top_p",
  "top_k",
  "min_p",
  "max_tokens",
  "repetition_penalty",
  "presence_penalty",
  "frequency_penalty",
  "seed",
  "stop",
];

/** The body for an answer to `messages`. Settings that are empty are not sent: the server has its own defaults. */
export function bodyOf(messages, settings, continues) {
  const body = { messages: messages.map((message) => ({ role: message.role, content: contentOf(message) })) };
  if (settings.system) body.messages.unshift({ role: "system", content: settings.system });
  for (const name of SAMPLING) {
    const value = settings[name];
    if (value !== undefined && value !== null && value !== "") body[name] = value;
  }
  if (continues) body.continue_final_message = true;
  return body;
}

/**
 * Streams into `answer` {content, reasoning, finish, error, stats} and calls `onUpdate` after each chunk. Never raises: an
 * answer that was stopped has finish "stopped", one that failed has `error` {message, code, status, retryAfterS}.
 */
export async function generate(messages, settings, answer, { continues, signal, onUpdate }) {
  const clock = new Clock();
  Object.assign(answer, { finish: null, error: null, stats: clock.stats });
  try {
    await chat(bodyOf(messages, settings, continues), signal, (chunk) => {
      take(answer, chunk, clock);
      onUpdate();
    });
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else {
      const { message, code = "", status = 0, retryAfterS = null } = error;
      answer.error = { message, code, status, retryAfterS };
    }
  }
  onUpdate();
}

function take(answer, chunk, clock) {
  const choice = chunk.choices[0];
  if (choice) {
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) clock.token();
    if (content) answer.content += content;
    if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
    if (choice.finish_reason) answer.finish = choice.finish_reason;
  }
  if (chunk.usage) clock.finish(chunk.usage, chunk.timings);
}

/** What a reader of the stream sees: the time to the first token, and the rate since. A token is a chunk until the server has counted. */
class Clock {
  constructor() {
    this.startedMs = performance.now();
    this.stats = { ttftMs: null, tokens: 0, rate: null, server: null };
  }

  token() {
    const nowMs = performance.now();
    const { stats } = this;
    stats.tokens += 1;
    if (stats.tokens === 1) {
      this.firstMs = nowMs;
      stats.ttftMs = nowMs - this.startedMs;
    } else if (nowMs > this.firstMs) stats.rate = ((stats.tokens - 1) * 1000) / (nowMs - this.firstMs);
  }

  finish(usage, timings) {
    this.stats.tokens = usage.completion_tokens;
    this.stats.server = {
      ...timings,
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    };
  }
}
