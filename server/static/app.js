// The chat page: what happens when, and who is told. The parts know nothing of each other.

import { setKey } from "./api.js";
import { Connection } from "./connection.js";
import { byId, download, fillIcons, h } from "./dom.js";
import { buildEmpty } from "./empty.js";
import { generate } from "./generation.js";
import { Panels } from "./panels.js";
import { ServerView } from "./server_view.js";
import { SettingsForm } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as shell from "./shell.js";
import * as store from "./store.js";
import { fillTexts, number, t } from "./texts.js";
import { Thread } from "./thread.js";

let conversation = store.create();
let state = { phase: "connecting" };
let about = null; // what the server says of itself
let models = [];
let running = null; // of the answer that streams: {controller, conversation}
let frame = 0;

const MAX_TITLE = 60;
const prompt = byId("prompt");
const panels = new Panels((name) => (name === "server" ? serverView.draw() : showSettings()));
const serverView = new ServerView(byId("server-view"));
const settingsForm = new SettingsForm(byId("settings-view"), keepSettings);
const sidebar = new Sidebar(byId("conversations"), byId("search"), {
  open,
  export: exportOne,
  remove,
  rename,
});
const thread = new Thread(byId("thread"), byId("jump"), { regenerate, resume, choose, resend, redraw });
const connection = new Connection(noteState, noteEvent);

// --- conversations ---

function keepSettings() {
  store.save(conversation, { touch: false });
  store.saveSettings(conversation.settings);
}

function open(id) {
  stop();
  conversation = store.get(id) ?? store.create();
  showModels();
  panels.closeSidebar();
  redraw();
  showSettings();
  if (!shell.isTouch()) prompt.focus();
}

function redraw() {
  const isBusy = running?.conversation === conversation;
  byId("title").textContent = conversation.title || t("untitled");
  document.title = conversation.title ? `${conversation.title} · Noria` : "Noria";
  thread.show(conversation, { isBusy, empty: buildEmpty(state, about, answerer(), send) });
  sidebar.show(conversation.id);
  history.replaceState(null, "", conversation.messages.length ? `#${conversation.id}` : location.pathname);
  shell.showBusy(Boolean(running));
}

function rename(id, title) {
  const renamed = store.get(id);
  renamed.title = title;
  store.save(renamed, { touch: false });
  if (id === conversation.id) redraw();
}

async function remove(id) {
  if (!(await shell.ask(t("removeAsk", { title: store.get(id).title })))) return;
  if (running?.conversation.id === id) stop();
  store.remove(id);
  if (id === conversation.id) open(null);
  else sidebar.show(conversation.id);
}

function exportOne(id) {
  const chosen = store.get(id);
  const names = { system: t("system"), user: t("you"), assistant: answerer(chosen) ?? "Noria" };
  download(`${shell.fileName(chosen.title)}.md`, store.asMarkdown(chosen, names), "text/markdown");
}

// --- answers ---

/** The first line, cut between words. */
function titleOf(text) {
  const line = text.trim().split("\n")[0];
  if (line.length <= MAX_TITLE) return line;
  return `${line.slice(0, MAX_TITLE).replace(/\s+\S*$/, "")}…`;
}

function send(text) {
  if (running || state.phase !== "ready" || !text.trim()) return false;
  conversation.title ||= titleOf(text);
  conversation.messages.push({ role: "user", content: text.trim() });
  answer();
  return true;
}

function last() {
  return conversation.messages.at(-1);
}

/** Another answer beside the last one; one that failed with nothing said is replaced. */
function regenerate() {
  if (running || last()?.role !== "assistant") return;
  const message = last();
  if (!message.answers[message.at].content) message.answers.splice(message.at, 1);
  answer(message);
}

function resume() {
  const message = last();
  if (running || message?.role !== "assistant") return;
  const current = message.answers[message.at];
  if (current.content) run(message, current, conversation.messages, true);
}

function resend(index, text) {
  if (running) return;
  conversation.messages.splice(index, Infinity, { role: "user", content: text });
  answer();
}

function choose(message, at) {
  message.at = at;
  store.save(conversation, { touch: false });
  redraw();
}

function answer(message = null) {
  if (!message) {
    message = { role: "assistant", at: 0, answers: [] };
    conversation.messages.push(message);
  }
  const fresh = { content: "", finish: null, error: null, stats: null };
  message.at = message.answers.push(fresh) - 1;
  run(message, fresh, conversation.messages.slice(0, -1), false);
}

async function run(message, current, messages, continues) {
  const mine = (running = { controller: new AbortController(), conversation });
  store.save(conversation);
  redraw();
  shell.announce(t("answerStarted"));
  const { signal } = mine.controller;
  await generate(messages, mine.conversation.settings, current, { continues, signal, onUpdate: schedule });
  if (running === mine) running = null;
  store.save(mine.conversation);
  cancelAnimationFrame(frame);
  frame = 0;
  if (current.error?.status === 401) connection.enter("key");
  if (["unreachable", "lost"].includes(current.error?.message)) connection.check();
  shell.announce(
    current.error
      ? t("answerFailed", { message: current.error.message })
      : current.finish === "stopped"
        ? t("answerStopped")
        : t("answerDone", { count: current.stats.tokens }),
  );
  if (mine.conversation === conversation) settle();
  else shell.showBusy(Boolean(running));
}

/** The answer is complete: its last words and the buttons below it, without losing the reader's place. */
function settle() {
  const { follows } = thread;
  const top = thread.element.scrollTop;
  redraw();
  if (!follows) {
    thread.element.scrollTop = top;
    thread.noteScroll();
  }
}

/** At most one redraw a frame, however fast tokens come. */
function schedule() {
  if (frame || running?.conversation !== conversation) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    thread.refresh();
  });
}

function stop() {
  running?.controller.abort();
}

// --- the server ---

function noteState(next) {
  const was = state.phase;
  state = next;
  if (next.models) {
    models = next.models;
    showModels();
  }
  shell.showState(next, answerer());
  if (next.phase === "key") shell.askForKey(was === "key");
  if (!conversation.messages.length && (was !== next.phase || next.phase === "loading")) redraw();
}

function noteEvent(name, data) {
  if (name === "hello") {
    about = data;
    serverView.hello(data);
    showSettings();
    if (!conversation.messages.length) redraw();
  } else {
    serverView.stats(data);
    const rate = data.generated_tokens_per_s;
    shell.showRate(rate > 0 ? t("rate", { rate: number(rate) }) : "", answerer());
  }
}

/** The name of the model that answers in a conversation; undefined until the server has told. */
function answerer({ settings } = conversation) {
  return settings.model ?? about?.model?.id;
}

/** Which model answers in this conversation, where the server has several. A choice it no longer has is forgotten. */
function showModels() {
  const { settings } = conversation;
  if (models.length && !models.includes(settings.model)) delete settings.model;
  byId("model-choice").hidden = models.length < 2;
  byId("model").replaceChildren(...models.map((id) => h("option", { value: id }, id)));
  byId("model").value = settings.model ?? models[0];
  shell.showState(state, answerer());
}

function showSettings() {
  if (panels.shown === "settings" || !panels.shown)
    settingsForm.show(conversation.settings, about?.model?.defaults ?? {});
}

// --- wiring ---

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!send(prompt.value)) return;
  prompt.value = "";
  shell.fitPrompt();
});
byId("stop").addEventListener("click", stop);
byId("model").addEventListener("change", () => {
  conversation.settings.model = byId("model").value;
  keepSettings();
  shell.showState(state, answerer());
  if (!conversation.messages.length) redraw();
});
byId("new").addEventListener("click", () => open(null));
byId("retry").addEventListener("click", () => connection.retry());
byId("export-all").addEventListener("click", () =>
  download("noria-conversations.json", store.exportAll(), "application/json"),
);
byId("import").addEventListener("click", () => byId("import-file").click());
byId("import-file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  const count = store.importAll(await file.text());
  shell.toast(count ? t("imported", { count }) : t("importBad"));
  sidebar.show(conversation.id);
});
byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value.trim());
  connection.check();
});
addEventListener("storage", (event) => {
  if (!store.reload(event.key) || running) return;
  conversation = store.get(conversation.id) ?? conversation;
  redraw();
});

shell.bind({
  language: () => {
    serverView.build();
    redraw();
    shell.showState(state, answerer());
    settingsForm.show(conversation.settings, about?.model?.defaults ?? {});
  },
  shortcuts: {
    stop,
    new: () => open(null),
    again: regenerate,
    panel: (name) => panels.toggle(name),
    edit: () => !running && thread.edit(),
  },
});

fillIcons();
fillTexts();
store.load(() => shell.toast(t("storageFull")));
conversation = store.get(location.hash.slice(1)) ?? conversation;
redraw();
panels.restore();
shell.showState(state, answerer());
connection.start();
if (!shell.isTouch()) prompt.focus();
document.body.append(h("span", { id: "ready", hidden: true })); // everything is wired; tests wait for it
