// Whether the server is there, ready, and lets us in; and its stream of statistics while somebody looks.

import * as api from "./api.js";

const LOADING_POLL_MS = 600;
const MAX_RETRY_S = 15;

/**
 * Keeps trying. Calls `onState({phase, …})` with phase connecting, loading, ready, draining, dead, gone (with retryS) or key, and
 * `onEvent(name, data)` for statistics. A hidden page holds no connection: a browser has few for each server.
 */
export class Connection {
  constructor(onState, onEvent) {
    this.onState = onState;
    this.onEvent = onEvent;
    this.failures = 0;
    this.silences = 0;
    this.phase = "connecting";
    document.addEventListener("visibilitychange", () => this.noteVisibility());
    addEventListener("online", () => this.retry());
  }

  start() {
    this.check();
  }

  /** At once, instead of when the timer says. */
  retry() {
    if (this.phase !== "ready") this.check();
  }

  enter(phase, details = {}) {
    this.phase = phase;
    this.onState({ phase, ...details });
  }

  async check() {
    clearTimeout(this.timer);
    const turn = (this.turn = (this.turn ?? 0) + 1);
    const found = await api.health();
    if (turn !== this.turn) return; // a later check has begun
    switch (found.phase) {
      case "ready":
        return this.greet(turn);
      case "loading":
        this.failures = 0;
        this.enter("loading", found);
        this.timer = setTimeout(() => this.check(), LOADING_POLL_MS);
        return;
      case "gone":
        return this.wait("gone");
    }
    this.enter(found.phase === "stale" ? "dead" : found.phase, found);
    this.timer = setTimeout(() => this.check(), 2000);
  }

  /** The server is ready; does it know our key? */
  async greet(turn) {
    try {
      const models = await api.models();
      if (turn !== this.turn) return;
      this.failures = 0;
      this.enter("ready", { models: models.map(({ id }) => id) });
      this.noteVisibility();
    } catch (error) {
      if (turn !== this.turn) return;
      if (error.status === 401) this.enter("key");
      else this.wait("gone");
    }
  }

  wait(phase) {
    this.failures += 1;
    const retryS = Math.min(MAX_RETRY_S, 2 ** Math.min(this.failures, 4) / 2);
    this.enter(phase, { retryAt: Date.now() + retryS * 1000 });
    this.timer = setTimeout(() => this.check(), retryS * 1000);
  }

  noteVisibility() {
    if (document.hidden) {
      this.watching?.abort();
      this.watching = null;
    } else if (this.phase === "ready" && !this.watching) this.watch();
    else if (!document.hidden) this.retry();
  }

  async watch() {
    const controller = (this.watching = new AbortController());
    let hasTold = false;
    try {
      await api.watch(controller.signal, (name, data) => {
        hasTold = true;
        this.silences = 0;
        if (name === "stats" && data.phase === "draining" && this.phase === "ready") this.enter("draining");
        this.onEvent(name, data);
      });
    } catch {
      // `check` finds out what is wrong
    }
    if (this.watching === controller) this.watching = null;
    if (controller.signal.aborted) return;
    if (hasTold) return this.check();
    // A server, or a proxy before it, that has no statistics for us: the chat works without, so ask less and less often.
    this.silences += 1;
    this.timer = setTimeout(() => this.check(), 1000 * 2 ** Math.min(this.silences, 6));
  }
}
