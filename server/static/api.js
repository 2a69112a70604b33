// Talking to the server this page came from. All addresses are relative, so that a proxy may serve it below any path.

import { readEvents } from "./sse.js";

const KEY = "noria.key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfterS });
  }
}

export function setKey(key) {
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // not kept
  }
}

export function getKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** A response that is not an error. Raises `ApiError`; its status is 0 where there was no answer at all. */
async function request(path, { body, signal } = {}) {
  const headers = {};
  if (getKey()) headers.authorization = `Bearer ${getKey()}`;
  if (body) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      signal,
      cache: "no-store",
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("unreachable");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's own page
  }
  const retryAfterS = Number(response.headers.get("retry-after")) || null;
  return new ApiError(error.message ?? `HTTP ${response.status}`, {
    status: response.status,
    code: error.code ?? "",
    retryAfterS,
  });
}

/** {phase, message, progress}; phase is the server's, or "gone". */
export async function health() {
  let response;
  try {
    response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout?.(8000) });
  } catch {
    return { phase: "gone" };
  }
  const body = await response.json().catch(() => ({}));
  if (response.ok) return { phase: "ready" };
  // Without the server's own word it is a proxy that answers for a server that is gone.
  return {
    phase: body.status ?? "gone",
    message: body.error?.message ?? "",
    progress: body.progress ?? null,
  };
}

export async function models() {
  return (await (await request("v1/models")).json()).data;
}

/** The state of the server once a second, until `signal`. Returns when the server has ended the stream. */
export async function watch(signal, onEvent) {
  const response = await request("stats/stream", { signal });
  await readEvents(response, (name, data) => onEvent(name, JSON.parse(data)));
}

/** Streams a chat completion. `onChunk` gets every chunk. Raises `ApiError`, also for an error inside the stream. */
export async function chat(body, signal, onChunk) {
  const response = await request("v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  });
  let isComplete = false;
  let failure = null;
  try {
    await readEvents(response, (_, data) => {
      if (data === "[DONE]") isComplete = true;
      else {
        const chunk = JSON.parse(data);
        if (chunk.error) failure = new ApiError(chunk.error.message, { code: chunk.error.code ?? "" });
        else onChunk(chunk);
      }
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("lost", { code: "lost" });
  }
  if (failure) throw failure;
  if (!isComplete) throw new ApiError("lost", { code: "lost" });
}
