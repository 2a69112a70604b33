// The reference: openapi.json of this server as a page.

import { byId, h } from "./dom.js";
import { inline } from "./inline.js";
import { buildCode } from "./markdown.js";

let documentOf = null;

function resolve(schema) {
  const path = schema?.$ref?.replace("#/", "").split("/");
  return path ? path.reduce((value, name) => value[name], documentOf) : schema;
}

function nameOf(schema) {
  return schema?.$ref?.split("/").at(-1);
}

/** A type in words: `integer, 1 to 20, or null`. */
function words(schema) {
  const name = nameOf(schema);
  if (name) return [h("a", { href: `#schema-${name}` }, name)];
  if (schema.anyOf) return join(schema.anyOf.map(words), " or ");
  if ("const" in schema) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (Array.isArray(schema.type)) return [schema.type.join(" or ")];
  if (schema.type === "array")
    return [
      "list of ",
      ...(schema.items ? words(schema.items) : ["anything"]),
      ...range(schema, "Items", " entries"),
    ];
  if (schema.type === "object") {
    const values = schema.additionalProperties;
    return [
      values ? "object of " : "object",
      ...(values ? words(values) : []),
      ...range(schema, "Properties", " entries"),
    ];
  }
  return [schema.type ?? "anything", ...range(schema, "imum", ""), ...range(schema, "Length", " characters")];
}

function range(schema, what, unit) {
  const [low, high] = [schema[`min${what}`], schema[`max${what}`]];
  const above = what === "imum" ? schema.exclusiveMinimum : undefined;
  const shown = (value) =>
    Math.abs(value) >= 2 ** 53 ? "2⁶³−1" : value === 2 ** 31 - 1 ? "2³¹−1" : String(value);
  const parts = [
    above !== undefined && `above ${above}`,
    low !== undefined && `at least ${shown(low)}`,
    high !== undefined && `at most ${shown(high)}`,
  ];
  const found = parts.filter(Boolean);
  return found.length ? [`, ${found.join(", ")}${unit}`] : [];
}

function join(lists, between) {
  return lists.flatMap((list, index) => (index ? [between, ...list] : list));
}

function rows(schema) {
  return Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const isRequired = schema.required?.includes(name);
    return row(name, isRequired, field, field.description);
  });
}

function row(name, isRequired, schema, text) {
  const preset = schema.default === undefined ? [] : [`; default ${JSON.stringify(schema.default)}`];
  return h(
    "tr",
    {},
    h("td", {}, h("code", { class: isRequired ? "required" : "" }, name)),
    h("td", {}, ...(text ? inline(text) : []), h("span", { class: "type" }, ...words(schema), ...preset)),
  );
}

function table(children) {
  return h("table", { class: "fields" }, h("tbody", {}, ...children));
}

/** The fields of a body; those that are refused or ignored are folded away. */
function fields(schema) {
  const all = rows(schema);
  const isAside = Object.values(schema.properties ?? {}).map((field) =>
    /^(Not supported|Accepted and ignored)/.test(field.description ?? ""),
  );
  const aside = all.filter((_, index) => isAside[index]);
  const parts = [table(all.filter((_, index) => !isAside[index]))];
  if (aside.length)
    parts.push(
      h(
        "details",
        {},
        h("summary", { class: "small" }, `${aside.length} fields that are refused or ignored`),
        table(aside),
      ),
    );
  return parts;
}

function curl(method, path, operation) {
  const body = operation.requestBody?.content["application/json"]?.example;
  const isStream =
    operation.responses["200"]?.content["text/event-stream"] &&
    !operation.responses["200"].content["application/json"];
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const query = path === "/generate_stream" && method === "get" ? "?prompt=The%20river" : "";
  const parts = [`curl ${isStream ? "-N " : ""}'${base}${path}${query}'`];
  if (body) parts.push("-H 'content-type: application/json'", `-d '${JSON.stringify(body)}'`);
  return parts.join(" \\\n  ");
}

function answers(operation) {
  return Object.entries(operation.responses).flatMap(([status, response]) => {
    const found = resolve(response);
    if (status === "default") return [];
    const shapes = Object.entries(found.content ?? {}).map(([type, { schema, "x-events": events }]) => {
      const told = events
        ? join(
            events.map(({ event, data }) => [event ? `${event}: ` : "", ...words(data)]),
            ", ",
          )
        : schema && nameOf(schema)
          ? words(schema)
          : [];
      return h("span", { class: "type" }, type, told.length ? ": " : "", ...told);
    });
    return [
      h(
        "tr",
        {},
        h("td", {}, h("span", { class: "status-code" }, status)),
        h("td", {}, ...inline(found.description), ...shapes),
      ),
    ];
  });
}

function article(path, method, operation) {
  const body = operation.requestBody?.content["application/json"].schema;
  const parts = [
    h("h3", {}, h("span", { class: `method is-${method}` }, method), path),
    h("p", {}, operation.summary + "."),
  ];
  if (operation.description) parts.push(h("p", { class: "quiet" }, ...inline(operation.description)));
  if (operation["x-aliases"])
    parts.push(
      h(
        "p",
        { class: "small quiet" },
        "Also: ",
        ...join(
          operation["x-aliases"].map((alias) => [h("code", {}, alias)]),
          " ",
        ),
      ),
    );
  if (operation.tags[0] !== "Pages")
    parts.push(buildCode({ text: curl(method, path, operation), language: "shell" }));
  if (operation.parameters)
    parts.push(
      h("h4", {}, "Parameters"),
      table(operation.parameters.map((each) => row(each.name, each.required, each.schema, each.description))),
    );
  if (body) parts.push(h("h4", {}, "Body"), ...fields(resolve(body)));
  parts.push(h("h4", {}, "Answers"), table(answers(operation)));
  return h("article", { id: operation.operationId }, ...parts);
}

function schemaArticle(name, schema) {
  const parts = [h("h3", {}, name)];
  if (schema.description) parts.push(h("p", { class: "quiet" }, ...inline(schema.description)));
  return h(
    "article",
    { id: `schema-${name}` },
    ...parts,
    ...(schema.properties ? fields(schema) : [h("p", {}, ...words(schema))]),
  );
}

function show() {
  const groups = documentOf.tags.map(({ name }) => ({ name, found: [] }));
  for (const [path, methods] of Object.entries(documentOf.paths)) {
    for (const [method, operation] of Object.entries(methods))
      groups.find(({ name }) => name === operation.tags[0]).found.push({ path, method, operation });
  }
  const links = groups.flatMap(({ name, found }) => [
    h("h2", {}, name),
    ...found.map(({ path, method, operation }) =>
      h(
        "a",
        { href: `#${operation.operationId}` },
        h("span", { class: `method is-${method}` }, method),
        path,
      ),
    ),
  ]);
  byId("routes").replaceChildren(...links, h("h2", {}, "Shapes"), h("a", { href: "#shapes" }, "All shapes"));
  const { title, version, description } = documentOf.info;
  byId("content").replaceChildren(
    h("h1", {}, `${title} API`),
    h("p", { class: "quiet" }, `Version ${version}`),
    ...description.split("\n\n").map((text) => h("p", {}, ...inline(text.replace(/\n/g, " ")))),
    ...groups.map(({ name, found }) =>
      h(
        "section",
        {},
        h("h2", {}, name),
        ...found.map(({ path, method, operation }) => article(path, method, operation)),
      ),
    ),
    h(
      "section",
      { id: "shapes" },
      h("h2", {}, "Shapes"),
      ...Object.entries(documentOf.components.schemas).map(([name, schema]) => schemaArticle(name, schema)),
    ),
  );
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

byId("filter").addEventListener("input", (event) => {
  const text = event.target.value.trim().toLowerCase();
  for (const element of document.querySelectorAll("article"))
    element.hidden = !element.textContent.toLowerCase().includes(text);
  for (const link of byId("routes").querySelectorAll("a"))
    link.hidden = !link.textContent.toLowerCase().includes(text);
});

try {
  documentOf = await (await fetch("openapi.json")).json();
  show();
} catch {
  byId("content").replaceChildren(
    h("p", {}, "openapi.json could not be read: the server cannot be reached."),
  );
}
