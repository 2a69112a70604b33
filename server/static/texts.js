// The language of the chat page, and its words by their keys.

import EN from "./texts_en.js";
import KO from "./texts_ko.js";

const LANGUAGES = { en: EN, ko: KO };

function choose() {
  let stored = null;
  try {
    stored = localStorage.getItem("noria.language");
  } catch {
    // not kept
  }
  return stored in LANGUAGES
    ? stored
    : (navigator.language || "en").toLowerCase().startsWith("ko")
      ? "ko"
      : "en";
}

let language = choose();

export function currentLanguage() {
  return language;
}

export function switchLanguage() {
  language = language === "en" ? "ko" : "en";
  try {
    localStorage.setItem("noria.language", language);
  } catch {
    // not kept
  }
}

/** The words of `key` in the language chosen. */
export function t(key, values = {}) {
  return LANGUAGES[language][key].replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

export function number(value, digits = 0) {
  return value.toLocaleString(language, { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Puts words where the document asks for them: `data-t` as text, `data-t-label` as label and tooltip, `data-t-placeholder`. */
export function fillTexts(root = document) {
  document.documentElement.lang = language;
  for (const element of root.querySelectorAll("[data-t]")) element.textContent = t(element.dataset.t);
  for (const element of root.querySelectorAll("[data-t-label]")) {
    element.setAttribute("aria-label", t(element.dataset.tLabel));
    if (element.tagName === "BUTTON" || element.tagName === "A") element.title = t(element.dataset.tLabel);
  }
  for (const element of root.querySelectorAll("[data-t-placeholder]"))
    element.placeholder = t(element.dataset.tPlaceholder);
}

/** Keys that a language lacks; the tests ask. */
export function missingTexts() {
  return [...Object.keys(EN).filter((key) => !(key in KO)), ...Object.keys(KO).filter((key) => !(key in EN))];
}
