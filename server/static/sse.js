// Server-sent events over fetch: unlike EventSource it can POST, send an API key and be stopped.

/** Calls `onEvent(name, data)` for each event of a response, data as text. Returns when the stream ends. */
export async function readEvents(response, onEvent) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const event = parseEvent(rest.slice(0, end));
      rest = rest.slice(end + 2);
      if (event) onEvent(event.name, event.data);
    }
  }
}

function parseEvent(text) {
  let name = "message";
  const data = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    else if (line.startsWith("event:")) name = line.slice(6).trim();
  }
  return data.length ? { name, data: data.join("\n") } : null;
}
