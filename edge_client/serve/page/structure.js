// Answers in JSON and tools: what the user pastes into the settings, checked here before it is
// sent. Pure.

const TYPES = ["array", "boolean", "integer", "null", "number", "object", "string"];
const OTHER_NAMES = {
  int: "integer",
  float: "number",
  double: "number",
  str: "string",
  bool: "boolean",
  dict: "object",
  list: "array",
  none: "null",
};
const FUNCTION_NAME = /^[a-zA-Z0-9_.-]{1,64}$/; // as the endpoint has it
const BY_NAME = ["properties", "$defs", "definitions"]; // keywords with a schema for each name
const SINGLE = ["items", "additionalProperties"]; // with one schema
const LISTS = ["anyOf", "oneOf", "allOf", "prefixItems"]; // with a list of schemas
const MOST_TOOLS = 128;
const DEEPEST = 64; // levels of a schema

// What a field holds cannot be used; the message says what to mend.
export class Unusable extends Error {}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Unusable(`this is no JSON: ${withLine(error.message, text)}`);
  }
}

// Some browsers say at which character the mistake is; people count lines.
function withLine(message, text) {
  const found = message.match(/ (?:in JSON )?at position (\d+)/);
  if (!found) return message;
  const line = text.slice(0, Number(found[1])).split("\n").length;
  return `${message.slice(0, found.index)}, in line ${line}`;
}

// The schema that answers have to match, null where the field is empty.
export function schemaOf(text) {
  if (!text.trim()) return null;
  const schema = parsed(text);
  if (!isObject(schema)) {
    throw new Unusable('a schema is an object, as {"type": "object", "properties": {...}}');
  }
  checkSchema(schema, "", 0);
  return schema;
}

// Refuses what no schema can be; keywords that this page does not know are left to the endpoint.
function checkSchema(schema, place, depth) {
  const refuse = (why) => {
    throw new Unusable(place ? `${place}: ${why}` : why);
  };
  if (depth > DEEPEST) refuse(`nested deeper than ${DEEPEST} levels`);
  if (typeof schema === "boolean") return;
  if (!isObject(schema)) refuse("a schema is an object");
  checkTypes(schema, refuse);
  const { required, enum: values } = schema;
  if (required !== undefined && !isListOfNames(required)) refuse('"required" is a list of names');
  if (values !== undefined && !isFullList(values)) refuse('"enum" is a list of values');
  for (const [name, part] of partsOf(schema, refuse)) {
    checkSchema(part, place ? `${place}.${name}` : name, depth + 1);
  }
}

const isFullList = (value) => Array.isArray(value) && value.length > 0;
const isListOfNames = (value) => {
  return Array.isArray(value) && value.every((name) => typeof name === "string");
};

function checkTypes(schema, refuse) {
  const types = [schema.type ?? []].flat();
  const unknown = types.find((type) => !TYPES.includes(type));
  if (unknown === undefined) return;
  const meant = OTHER_NAMES[String(unknown).toLowerCase()];
  const hint = meant ? `: did you mean "${meant}"?` : "";
  refuse(`${JSON.stringify(unknown)} is no type of JSON${hint}`);
}

// The schemas within a schema, each with its place.
function partsOf(schema, refuse) {
  const parts = [];
  for (const keyword of BY_NAME) {
    const named = schema[keyword];
    if (named === undefined) continue;
    if (!isObject(named)) refuse(`"${keyword}" is an object: a schema for each name`);
    for (const [name, part] of Object.entries(named)) parts.push([`${keyword}.${name}`, part]);
  }
  for (const keyword of SINGLE) {
    if (schema[keyword] !== undefined) parts.push([keyword, schema[keyword]]);
  }
  for (const keyword of LISTS) {
    const list = schema[keyword];
    if (list === undefined) continue;
    if (!Array.isArray(list)) refuse(`"${keyword}" is a list of schemas`);
    list.forEach((part, at) => parts.push([`${keyword}[${at}]`, part]));
  }
  return parts;
}

// The tools that the model may call, as OpenAI's API has them; an empty list where the field is
// empty. A function's own object is taken, too.
export function toolsOf(text) {
  if (!text.trim()) return [];
  const given = parsed(text);
  if (!Array.isArray(given)) {
    throw new Unusable('tools are a list, as [{"name": "add", "parameters": {...}}]');
  }
  if (given.length > MOST_TOOLS) throw new Unusable(`${given.length} tools, at most ${MOST_TOOLS}`);
  const tools = given.map((tool, at) => ({
    type: "function",
    function: functionOf(tool, `tool ${at + 1}`),
  }));
  const names = tools.map((tool) => tool.function.name);
  const twice = names.find((name, at) => names.indexOf(name) !== at);
  if (twice) throw new Unusable(`two tools are called ${twice}`);
  return tools;
}

function functionOf(tool, where) {
  if (!isObject(tool)) throw new Unusable(`${where}: a tool is an object`);
  if (tool.type !== undefined && tool.type !== "function") {
    throw new Unusable(`${where}: only functions are called, not ${JSON.stringify(tool.type)}`);
  }
  const made = isObject(tool.function) ? tool.function : tool;
  const { name, description, parameters, strict } = made;
  if (typeof name !== "string" || !FUNCTION_NAME.test(name)) {
    throw new Unusable(`${where}: "name" is up to 64 letters, digits, dots, dashes or underscores`);
  }
  if (description !== undefined && typeof description !== "string") {
    throw new Unusable(`${name}: "description" is a text`);
  }
  if (parameters !== undefined) {
    if (!isObject(parameters)) throw new Unusable(`${name}: "parameters" is a schema: an object`);
    checkSchema(parameters, `${name}.parameters`, 0);
  }
  return { name, description, parameters, strict };
}

// The fields of a request for what is set.
export function structureFields(schemaText, toolsText) {
  const fields = {};
  const schema = schemaOf(schemaText);
  const tools = toolsOf(toolsText);
  if (schema) {
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (tools.length) fields.tools = tools;
  return fields;
}

// What is set, in a few words; "" for nothing.
export function structureWords(schemaText, toolsText) {
  const parts = [];
  if (schemaText.trim()) parts.push("answers in JSON");
  try {
    const { length } = toolsOf(toolsText);
    if (length) parts.push(length === 1 ? "1 tool" : `${length} tools`);
  } catch {
    parts.push("tools that cannot be used");
  }
  return parts.join(", ");
}

// ---- calls

// A call of the stream as a message keeps it.
export function callOf({ id, function: { name, arguments: given } }) {
  return { id, name, arguments: given };
}

// What an answer says in the conversation: while it is asked again, what it said before.
export const standing = (node) => node.earlier ?? node;

// A message of the conversation as the endpoint takes it.
export function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.text };
  const { text, calls: made } = standing(node);
  const message = { role: node.role, content: text };
  if (!made?.length) return message;
  const calls = made.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { ...message, tool_calls: calls };
}

// The arguments of a call as pairs of name and text, in their order; one pair without a name where
// they are no object.
export function argumentsOf(call) {
  let given;
  try {
    given = JSON.parse(call.arguments);
  } catch {
    return [["", call.arguments]];
  }
  if (!isObject(given)) return [["", call.arguments]];
  return Object.entries(given).map(([name, value]) => [
    name,
    typeof value === "string" ? value : JSON.stringify(value),
  ]);
}
