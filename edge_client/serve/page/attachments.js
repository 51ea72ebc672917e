// Files that the user gives to the page: which can be a part of a message, and why others cannot.

const LARGEST = 256 * 1024; // bytes of an attached text: more than a context holds
const PDF = "%PDF-"; // begins one; some are nothing but text for a program that cannot read them
const KINDS = [
  // What is no text, by its type or the end of its name; the first that fits.
  ["a PDF", /^application\/pdf$|\.pdf$/i],
  ["a picture", /^image\/|\.(heic|heif|avif)$/i],
  ["a recording", /^(audio|video)\//i],
  ["an office document", /officedocument|opendocument|msword|ms-(excel|powerpoint)/i],
  ["an office document", /\.(docx?|xlsx?|pptx?|od[tsp])$/i],
  ["an archive", /zip|x-tar|compressed|\.(zip|tar|t?gz|7z|xz|zst)$/i],
];
const BLOCK = /^([^\n]{1,250}\.\w{1,16}):\n(`{3,})\n[^]*?\n\2$/gm; // of `asBlock`
const WHY = "the model reads text";
const WHAT = "code, Markdown, CSV, JSON, logs";

// Says why a file cannot be attached.
export class Unattachable extends Error {}

// The text of a file. What it is decides first, and not how large it is: of a large picture the
// reader need not know its size. The bytes come before the type, which some systems guess by the
// name: the ending of TypeScript is also that of a video.
export async function textOf(file) {
  const bytes = await firstBytes(file);
  const text = decoded(bytes, bytes.byteLength < file.size);
  if (text === null || text.startsWith(PDF)) {
    const kind = kindOf(file, text);
    throw new Unattachable(`${file.name} is ${kind}: ${WHY}, so attach text (${WHAT})`);
  }
  if (bytes.byteLength < file.size) {
    const size = `${Math.ceil(file.size / 1024)} kB`;
    const most = `${LARGEST / 1024} kB`;
    throw new Unattachable(`${file.name} has ${size}: attach at most ${most}, or paste a part`);
  }
  return text;
}

// A text as a part of a message, where it can be read and changed.
export function asBlock(name, text) {
  // Longer than every run of backticks in it: the file cannot end its own block.
  const runs = [...text.matchAll(/`+/g)].map(([run]) => run.length);
  const fence = "`".repeat(Math.max(3, ...runs.map((length) => length + 1)));
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
}

// What a message is about: its words without the blocks of files; of files alone, their names.
export function wordsOf(text) {
  const names = [];
  const words = text.replace(BLOCK, (_, name) => {
    names.push(name);
    return "";
  });
  return words.trim() || names.join(", ");
}

// The files of a paste; none where there is text beside them, as spreadsheets put a picture of the
// cells beside the cells.
export function filesOf(transfer) {
  if (!transfer || transfer.types.includes("text/plain")) return [];
  return [...transfer.files];
}

async function firstBytes(file) {
  try {
    return await file.slice(0, LARGEST).arrayBuffer();
  } catch {
    throw new Unattachable(`${file.name} cannot be read: attach files, no folders`);
  }
}

function kindOf(file, text) {
  if (text?.startsWith(PDF)) return KINDS[0][0];
  for (const [kind, pattern] of KINDS) {
    if (pattern.test(file.type) || pattern.test(file.name)) return kind;
  }
  return "no text in UTF-8";
}

// The bytes as text; null if they are none. `isBeginning`: the last character may be cut in two.
function decoded(bytes, isBeginning) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes, { stream: isBeginning });
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
