// Small helpers: ids of sessions, and text from others.

/** @param {Uint8Array} bytes */
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {string} text */
export const unhex = (text) => Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/** @template T @param {ArrayLike<T>} a @param {ArrayLike<T>} b */
export function same(a, b) {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}

// Control characters, line and paragraph separators, lone surrogates, and the marks that reorder text.
const UNSAFE = /[\u0000-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]|\p{Surrogate}/gu;
const LONGEST = 300;

/** Text from the other end as one line of bounded length. @param {string} text */
export function safeLine(text) {
  const short = text.length <= LONGEST ? text : text.slice(0, LONGEST) + "…";
  return short.replace(UNSAFE, (found) => {
    const code = found.charCodeAt(0);
    const named = { 9: "\\t", 10: "\\n", 13: "\\r" }[code];
    return named ?? (code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`);
  });
}

/** The other end broke the protocol. */
export class ProtocolError extends Error {}
