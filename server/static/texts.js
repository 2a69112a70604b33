// All words of the chat page, in English and Korean. `{name}` is filled in by `t`.

const EN = {
  skip: "Skip to the message box", conversations: "Conversations", newChat: "New chat", search: "Search", noMatches: "Nothing found",
  today: "Today", earlier: "Earlier", rename: "Rename", remove: "Delete", export: "Export", exportAll: "Export all conversations",
  removeAsk: "Delete “{title}”? It is kept only in this browser.", cancel: "Cancel", save: "Save", close: "Close", untitled: "New chat",
  menu: "Conversations", server: "Server", settings: "Settings", theme: "Theme: {name}", light: "light", dark: "dark", auto: "as the system",
  language: "한국어로 보기", shortcuts: "Keyboard shortcuts", docs: "API reference", chatPage: "Chat", thread: "Messages", scrollDown: "To the latest message",
  placeholder: "Write a message", send: "Send", stop: "Stop", hint: "Enter sends · Shift+Enter breaks the line · Esc stops",
  greeting: "What shall we talk about?", greetingText: "Answers are computed by {model} on this server. Conversations stay in your browser.",
  idea1: "Explain how a water wheel turns flow into work", idea2: "Write a short poem about rivers in autumn",
  idea3: "Make a table of three sorting algorithms and their running time", idea4: "Write a Python function that checks for palindromes",
  you: "You", copy: "Copy", code: "code", edit: "Edit", regenerate: "Answer again", continue: "Continue", previous: "Previous answer", next: "Next answer", of: "{at} of {all}",
  resend: "Send again", thinking: "Thoughts", waiting: "Waiting for the first token", queued: "{count} requests are waiting",
  ttft: "first token {ms}", rate: "{rate} tokens/s", tokens: "{count} tokens", oneToken: "1 token", stopped: "stopped", length: "length limit reached",
  breakdown: "On the server: queue {queue} ms, prefill {prefill} ms, decode {decode} ms, {cached} of {prompt} prompt tokens from the cache, preempted {preemptions} times",
  answerStarted: "The answer begins", answerDone: "The answer is complete: {count} tokens", answerStopped: "Stopped", answerFailed: "The answer failed: {message}",
  system: "System prompt", systemPlaceholder: "How should the model behave?", temperature: "Temperature", temperatureHelp: "0 always takes the likeliest token; higher is more varied.",
  topP: "Top p", topK: "Top k", minP: "Min p", maxTokens: "Maximum tokens", maxTokensDefault: "room left", repetition: "Repetition penalty", presence: "Presence penalty", frequency: "Frequency penalty",
  seed: "Seed", seedHelp: "The same seed and settings give the same answer.", seedDefault: "random", stopStrings: "Stop strings", stopHelp: "One per line", reset: "Back to the server's defaults", off: "off",
  settingsScope: "For this conversation. Empty fields follow the server.", more: "More", model: "Model", apiKey: "API key", forgetKey: "Forget the key", import: "Import", imported: "{count} conversations imported", importBad: "This file holds no conversations.",
  running: "running", waitingRequests: "waiting", tokensPerS: "tokens/s", stepTime: "step", kvBlocks: "KV cache", used: "used", cached: "cached", free: "free",
  blocksText: "{used} used, {cached} cached, {free} free of {all} blocks of {size} tokens", rateChart: "Tokens per second, last {minutes} minutes", loadChart: "Requests, last {minutes} minutes",
  peak: "peak {value}", generated: "generated", prompt: "prompt", seats: "of {count} seats", preemptions: "preemptions", cacheHits: "prompt tokens from cache", finished: "finished", context: "context", version: "version", ago: "{minutes} min ago", now: "now", noStats: "Not connected",
  connecting: "Connecting", ready: "Ready", loading: "Loading the model", loadingText: "The page is ready as soon as the model is.", draining: "The server is shutting down. What runs is still finished.",
  gone: "The server cannot be reached.", retryIn: "Trying again in {s} s.", retryNow: "Try now", dead: "The engine has stopped: {message}",
  keyTitle: "This server asks for an API key", keyText: "It is kept until this tab is closed and sent to this server only.", keyBad: "The server does not accept this key.", open: "Open",
  lost: "The connection was lost before the answer was complete.", queueFull: "The server is full. Try again in {s} s.", storageFull: "The browser's storage is full: this conversation is not kept. Delete or export some.",
  noTemplate: "The served model has no chat template, so it cannot chat. Its completions are at POST /v1/completions.",
  kSend: "Send the message", kBreak: "New line", kStop: "Stop the answer; close what is open", kEdit: "Edit your last message (in an empty box)", kNew: "New chat", kAgain: "Answer again", kServer: "Server view", kSettings: "Settings", kFocus: "To the message box", kHelp: "This list",
};

const KO = {
  skip: "입력창으로 건너뛰기", conversations: "대화 목록", newChat: "새 대화", search: "검색", noMatches: "결과가 없습니다",
  today: "오늘", earlier: "이전", rename: "이름 바꾸기", remove: "삭제", export: "내보내기", exportAll: "모든 대화 내보내기",
  removeAsk: "“{title}” 대화를 삭제할까요? 이 브라우저에만 저장되어 있습니다.", cancel: "취소", save: "저장", close: "닫기", untitled: "새 대화",
  menu: "대화 목록", server: "서버", settings: "설정", theme: "테마: {name}", light: "밝게", dark: "어둡게", auto: "시스템 설정",
  language: "View in English", shortcuts: "단축키", docs: "API 문서", chatPage: "대화", thread: "메시지", scrollDown: "최근 메시지로",
  placeholder: "메시지를 입력하세요", send: "보내기", stop: "중지", hint: "Enter 보내기 · Shift+Enter 줄바꿈 · Esc 중지",
  greeting: "무엇을 이야기해 볼까요?", greetingText: "답변은 이 서버의 {model} 모델이 만듭니다. 대화는 브라우저에만 저장됩니다.",
  idea1: "물레방아가 물의 흐름을 일로 바꾸는 원리를 설명해 줘", idea2: "가을 강에 대한 짧은 시를 써 줘",
  idea3: "정렬 알고리즘 세 가지와 실행 시간을 표로 만들어 줘", idea4: "회문을 검사하는 파이썬 함수를 작성해 줘",
  you: "나", copy: "복사", code: "코드", edit: "수정", regenerate: "다시 답변", continue: "이어서 쓰기", previous: "이전 답변", next: "다음 답변", of: "{at} / {all}",
  resend: "다시 보내기", thinking: "생각 과정", waiting: "첫 토큰을 기다리는 중", queued: "대기 중인 요청 {count}개",
  ttft: "첫 토큰 {ms}", rate: "초당 {rate} 토큰", tokens: "{count} 토큰", oneToken: "1 토큰", stopped: "중지됨", length: "길이 제한에 도달",
  breakdown: "서버: 대기 {queue} ms, 프리필 {prefill} ms, 디코드 {decode} ms, 프롬프트 토큰 {prompt}개 중 {cached}개 캐시 사용, 선점 {preemptions}회",
  answerStarted: "답변이 시작됩니다", answerDone: "답변 완료: {count} 토큰", answerStopped: "중지했습니다", answerFailed: "답변 실패: {message}",
  system: "시스템 프롬프트", systemPlaceholder: "모델이 어떻게 행동해야 하나요?", temperature: "온도", temperatureHelp: "0이면 항상 가장 확률이 높은 토큰을 고르고, 높을수록 다양해집니다.",
  topP: "Top p", topK: "Top k", minP: "Min p", maxTokens: "최대 토큰 수", maxTokensDefault: "남은 길이", repetition: "반복 페널티", presence: "존재 페널티", frequency: "빈도 페널티",
  seed: "시드", seedHelp: "시드와 설정이 같으면 답변도 같습니다.", seedDefault: "무작위", stopStrings: "중지 문자열", stopHelp: "한 줄에 하나씩", reset: "서버 기본값으로", off: "끔",
  settingsScope: "이 대화에만 적용됩니다. 빈 칸은 서버 기본값을 따릅니다.", more: "더 보기", model: "모델", apiKey: "API 키", forgetKey: "키 지우기", import: "가져오기", imported: "대화 {count}개를 가져왔습니다", importBad: "이 파일에는 대화가 없습니다.",
  running: "실행 중", waitingRequests: "대기 중", tokensPerS: "토큰/초", stepTime: "스텝", kvBlocks: "KV 캐시", used: "사용", cached: "캐시", free: "여유",
  blocksText: "{size}토큰 블록 {all}개 중 사용 {used}, 캐시 {cached}, 여유 {free}", rateChart: "최근 {minutes}분 초당 토큰", loadChart: "최근 {minutes}분 요청",
  peak: "최고 {value}", generated: "생성", prompt: "프롬프트", seats: "자리 {count}개 중", preemptions: "선점", cacheHits: "캐시에서 온 프롬프트 토큰", finished: "완료", context: "컨텍스트", version: "버전", ago: "{minutes}분 전", now: "지금", noStats: "연결되지 않음",
  connecting: "연결 중", ready: "준비됨", loading: "모델을 불러오는 중", loadingText: "모델이 준비되면 바로 쓸 수 있습니다.", draining: "서버를 종료하는 중입니다. 진행 중인 답변은 마무리됩니다.",
  gone: "서버에 연결할 수 없습니다.", retryIn: "{s}초 뒤에 다시 시도합니다.", retryNow: "지금 시도", dead: "엔진이 멈췄습니다: {message}",
  keyTitle: "이 서버는 API 키가 필요합니다", keyText: "탭을 닫을 때까지만 보관하고 이 서버에만 보냅니다.", keyBad: "서버가 이 키를 받아들이지 않습니다.", open: "열기",
  lost: "답변이 끝나기 전에 연결이 끊어졌습니다.", queueFull: "서버가 가득 찼습니다. {s}초 뒤에 다시 시도하세요.", storageFull: "브라우저 저장 공간이 가득 차서 이 대화를 저장하지 못했습니다. 일부를 삭제하거나 내보내세요.",
  noTemplate: "이 모델에는 채팅 템플릿이 없어 대화할 수 없습니다. POST /v1/completions 를 사용하세요.",
  kSend: "메시지 보내기", kBreak: "줄바꿈", kStop: "답변 중지, 열린 창 닫기", kEdit: "마지막 메시지 수정 (빈 입력창에서)", kNew: "새 대화", kAgain: "다시 답변", kServer: "서버 보기", kSettings: "설정", kFocus: "입력창으로", kHelp: "이 목록",
};

const LANGUAGES = { en: EN, ko: KO };

function choose() {
  let stored = null;
  try {
    stored = localStorage.getItem("noria.language");
  } catch {
    // not kept
  }
  return stored in LANGUAGES ? stored : (navigator.language || "en").toLowerCase().startsWith("ko") ? "ko" : "en";
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
  for (const element of root.querySelectorAll("[data-t-placeholder]")) element.placeholder = t(element.dataset.tPlaceholder);
}

/** Keys that a language lacks; the tests ask. */
export function missingTexts() {
  return [...Object.keys(EN).filter((key) => !(key in KO)), ...Object.keys(KO).filter((key) => !(key in EN))];
}
