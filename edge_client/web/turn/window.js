// A chat that outgrows the context goes on without its oldest turns. As moa/chat_window.py.

import { ANSWER_ROOM } from "./constants.js";

/** @typedef {{role: string, content: string}} ChatMessage */

/** Tokens that a chat may take of the context, where its answer may have so many; 0: as many as the
 * model likes.
 * @param {number} context
 * @param {number} answer */
export function promptRoom(context, answer) {
  return context - Math.min(answer || ANSWER_ROOM, Math.floor(context / 2));
}

/** The line for the user. @param {number} messages */
export function leftOutNotice(messages) {
  return `the context is full: the ${messages} oldest messages are no longer sent`;
}

/** The messages of a chat that are sent, without its oldest turns if there are more than `room`
 * tokens, their ids, and how many messages that leaves out.
 * @param {ChatMessage[]} messages
 * @param {number} room
 * @param {(messages: ChatMessage[]) => number[]} encode */
export function fitting(messages, room, encode) {
  const spoken = messages.findIndex(({ role }) => role !== "system");
  const first = spoken < 0 ? messages.length : spoken;
  const turns = messages.flatMap(({ role }, at) => (role === "user" && at > first ? [at] : []));
  const without = (/** @type {number} */ leftOut) => {
    const sent = [...messages.slice(0, first), ...messages.slice(leftOut)];
    return { sent, ids: encode(sent), leftOut: leftOut - first };
  };
  const whole = without(first);
  const over = whole.ids.length - room;
  if (over <= 0 || !turns.length) return whole;
  const quarter = Math.max(1, Math.floor(room / 4));
  const fewer = Math.ceil(over / quarter) * quarter;
  let low = 0;
  let high = turns.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (whole.ids.length - without(turns[middle]).ids.length >= fewer) high = middle;
    else low = middle + 1;
  }
  return without(turns[low]);
}
