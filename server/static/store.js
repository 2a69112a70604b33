// Conversations in the browser's storage, one entry each, so that two tabs do not overwrite each other's.
//
// A conversation: {id, title, created, updated, settings, messages}. A message of the user: {role, content}; of the assistant:
// {role, at, answers: [{content, reasoning, finish, error, stats}]}, where `at` is the answer that is shown and continued.

const PREFIX = "noria.chat.";
const SETTINGS = "noria.settings";
const conversations = new Map();
let onFull = () => {};

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

export function load(whenFull) {
  onFull = whenFull;
  try {
    for (let index = 0; index < localStorage.length; index += 1) reload(localStorage.key(index));
  } catch {
    // storage is switched off: conversations live as long as the tab
  }
}

/** Takes over what another tab has written; whether the key was a conversation's. */
export function reload(key) {
  if (!key?.startsWith(PREFIX)) return false;
  const found = read(key);
  if (isConversation(found)) conversations.set(found.id, found);
  else conversations.delete(key.slice(PREFIX.length));
  return true;
}

function isConversation(value) {
  const isAnswer = (answer) => typeof answer?.content === "string";
  const isMessage = (message) =>
    message?.role === "user"
      ? typeof message.content === "string"
      : message?.role === "assistant" &&
        Array.isArray(message.answers) &&
        message.answers.length > 0 &&
        message.answers.every(isAnswer) &&
        message.answers[message.at];
  return (
    typeof value?.id === "string" &&
    Array.isArray(value.messages) &&
    value.messages.every(isMessage) &&
    typeof value.title === "string"
  );
}

/** Newest first. */
export function all() {
  return [...conversations.values()].sort((a, b) => b.updated - a.updated);
}

export function get(id) {
  return conversations.get(id);
}

/** A new one with the settings used last; it is kept once it has a message. */
export function create() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(9)), (byte) =>
    byte.toString(36).padStart(2, "0"),
  ).join("");
  return {
    id,
    title: "",
    created: Date.now(),
    updated: Date.now(),
    settings: read(SETTINGS) ?? {},
    messages: [],
  };
}

export function save(conversation, { touch = true } = {}) {
  if (!conversation.messages.length) return;
  if (touch) conversation.updated = Date.now();
  conversations.set(conversation.id, conversation);
  write(PREFIX + conversation.id, conversation);
}

export function saveSettings(settings) {
  const { system, ...sampling } = settings;
  write(SETTINGS, sampling); // a system prompt belongs to its conversation
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    onFull();
  }
}

export function remove(id) {
  conversations.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // nothing was kept
  }
}

/** Conversations of an exported file; how many were taken. */
export function importAll(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return 0;
  }
  const list = (Array.isArray(found?.conversations) ? found.conversations : []).filter(isConversation);
  for (const conversation of list) save(conversation, { touch: false });
  return list.length;
}

export function exportAll() {
  return JSON.stringify({ application: "noria", conversations: all() }, null, 1);
}

/** The text that the model is given and that is shown of a message. */
export function contentOf(message) {
  return message.role === "user" ? message.content : message.answers[message.at].content;
}

export function asMarkdown(conversation, names) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system) parts.push(`## ${names.system}\n\n${conversation.settings.system}`);
  for (const message of conversation.messages)
    parts.push(`## ${names[message.role]}\n\n${contentOf(message)}`);
  return parts.join("\n\n") + "\n";
}
