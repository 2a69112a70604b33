// The frame around the conversation: status, banner, dialogs, theme, language, message box and keyboard.

import { byId, h, icon } from "./dom.js";
import { fillTexts, switchLanguage, t } from "./texts.js";

const SHORTCUTS = [
  ["Enter", "kSend"],
  ["Shift+Enter", "kBreak"],
  ["Esc", "kStop"],
  ["↑", "kEdit"],
  ["/", "kFocus"],
  ["Alt+N", "kNew"],
  ["Alt+R", "kAgain"],
  ["Alt+S", "kServer"],
  ["Alt+O", "kSettings"],
  ["?", "kHelp"],
];
const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };
const prompt = byId("prompt");
let bannerTimer = 0;

export function isTouch() {
  return matchMedia("(pointer: coarse)").matches;
}

export function fileName(title) {
  return (
    title
      .replace(/[^\p{L}\p{N}]+/gu, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 60) || "conversation"
  );
}

export function announce(text) {
  byId("announcer").textContent = text;
}

export function toast(text) {
  const element = byId("toast");
  element.textContent = text;
  element.hidden = false;
  setTimeout(() => (element.hidden = true), 6000);
}

/** Whether the question was answered with yes. */
export function ask(text) {
  const dialog = byId("ask-dialog");
  byId("ask-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }),
  );
}

export function askForKey(wasWrong) {
  byId("key-error").hidden = !wasWrong;
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
}

// --- status and banner ---

export function showState({ phase, retryAt, message, progress }, model) {
  byId("status").dataset.phase = phase;
  const words = {
    ready: model ?? t("ready"),
    loading: progress == null ? t("loading") : `${t("loading")} ${Math.round(progress * 100)} %`,
    connecting: t("connecting"),
  };
  byId("status-text").textContent = words[phase] ?? t("noStats");
  byId("send").disabled = phase !== "ready";
  clearInterval(bannerTimer);
  const texts = {
    gone: () => `${t("gone")} ${t("retryIn", { s: Math.max(1, Math.ceil((retryAt - Date.now()) / 1000)) })}`,
    draining: () => t("draining"),
    dead: () => t("dead", { message: message ?? "" }),
  };
  const text = texts[phase];
  byId("banner").hidden = !text;
  byId("retry").hidden = phase !== "gone";
  if (!text) return;
  byId("banner-text").textContent = text();
  if (phase === "gone") bannerTimer = setInterval(() => (byId("banner-text").textContent = text()), 500);
}

export function showRate(rate, model) {
  byId("status-text").textContent = rate || model || t("ready");
  byId("status").classList.toggle("is-busy", Boolean(rate));
}

export function showBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
}

export function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

// --- theme and language ---

function currentTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

function showTheme() {
  const [button, theme] = [byId("theme"), currentTheme()];
  button.replaceChildren(icon(THEME_ICONS[theme]));
  button.title = t("theme", { name: t(theme) });
  button.setAttribute("aria-label", button.title);
}

function switchTheme() {
  const theme = THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("noria.theme", theme);
  } catch {
    // not kept
  }
  showTheme();
}

function showHelp() {
  const list = SHORTCUTS.flatMap(([keys, text]) => [
    h("dt", {}, ...keys.split("+").map((key) => h("kbd", {}, key))),
    h("dd", {}, t(text)),
  ]);
  byId("shortcuts").replaceChildren(...list);
  byId("help-dialog").showModal();
}

// --- wiring ---

/** `language` is called after a switch; `shortcuts` are what keys do. */
export function bind({ language, shortcuts }) {
  byId("theme").addEventListener("click", switchTheme);
  byId("help").addEventListener("click", showHelp);
  byId("language").addEventListener("click", () => {
    switchLanguage();
    fillTexts();
    showTheme();
    language();
  });
  byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", (event) => {
    if (event.isComposing || event.keyCode === 229) return; // a Korean syllable is still being put together
    if (event.key === "Enter" && !event.shiftKey && !event.ctrlKey && !event.altKey) {
      event.preventDefault();
      byId("composer").requestSubmit();
    } else if (event.key === "ArrowUp" && !prompt.value) {
      event.preventDefault();
      shortcuts.edit();
    }
  });
  addEventListener("keydown", (event) => onKey(event, shortcuts));
  showTheme();
}

function onKey(event, shortcuts) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (!byId("stop").hidden) shortcuts.stop();
    else byId("veil").click();
    return;
  }
  const isTyping = event.target.matches?.("input, textarea, select");
  const actions = event.altKey
    ? {
        KeyN: shortcuts.new,
        KeyR: shortcuts.again,
        KeyS: () => shortcuts.panel("server"),
        KeyO: () => shortcuts.panel("settings"),
      }
    : {};
  const action =
    actions[event.code] ??
    (!isTyping && !event.ctrlKey && !event.metaKey
      ? { "/": () => prompt.focus(), "?": showHelp }[event.key]
      : null);
  if (!action) return;
  event.preventDefault();
  action();
}
