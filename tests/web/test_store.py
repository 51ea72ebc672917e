"""The page's conversations: what two tabs write is all there, and no file or store stops the page."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.web.node import Node

IMPORTS = """import { Shelf, add, imported, newConversation, newestLeaf, path, sound }
    from "./../../serve/page/store.js";
    import { asBlock } from "./../../serve/page/attachments.js";"""
HANDLE = r"""
    if (ask.asked) {
      const begun = newConversation();
      const parts = ask.asked.map((one) => (one.file ? asBlock(one.file, one.text) : one));
      add(begun, "", "user", parts.join("\n"));
      return begun.title;
    }
    if (ask.judge) return ask.judge.map((one) => [Boolean(sound(one)), imported(one)]);
    if (ask.deep) {
      const nodes = {};
      let parent = "";
      for (let at = 0; at < ask.deep; at++) {
        const id = at.toString(16).padStart(8, "0");
        nodes[id] = { id, parent, role: "user", text: "", at };
        parent = id;
      }
      const given = { id: "00000000", title: "", system: "", leaf: parent, nodes };
      return [sound(given), path(given).length, newestLeaf(given, nodes["00000000"]) === parent];
    }

    // A table as the browser's: values are copies, one transaction at a time, at a time of its own.
    let seed = ask.seed;
    const draw = (below) => {
      seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
      return Math.floor((seed / 2 ** 32) * below);
    };
    const pause = async () => { for (let at = draw(6); at > 0; at--) await null; };
    const rows = new Map();
    const copy = (value) => (value === undefined ? undefined : structuredClone(value));
    const table = {
      async all() { await pause(); return [...rows.values()].map(copy); },
      async get(id) { await pause(); return copy(rows.get(id)); },
      async update(id, change) {
        await pause();
        const changed = change(copy(rows.get(id)));
        if (changed) rows.set(id, copy(changed));
        await pause();
        return changed;
      },
      async remove(id) { await pause(); rows.delete(id); },
    };

    class Tab {
      constructor(name) {
        this.name = name;
        this.running = new Set();
        this.shelf = new Shelf(table, (id) => this.running.has(id));
        this.said = 0;
      }
      async open() { [this.conversation] = (await this.shelf.all()).conversations; }
      keep() { return this.shelf.keep(this.conversation); }
      text() { const text = `${this.name}${++this.said};`; written.add(text); return text; }
      async question() {
        const question = add(this.conversation, this.conversation.leaf, "user", this.text());
        const node = add(this.conversation, question.id, "assistant", "");
        await this.answer(node);
      }
      async answer(node) {
        this.running.add(node.id);
        node.state = "running";
        const keeping = [this.keep()];
        for (let at = draw(4); at >= 0; at--) {
          await pause();
          node.text += this.text();
          if (draw(3) === 0) keeping.push(this.keep());
        }
        await Promise.all(keeping);
        node.state = "done";
        this.running.delete(node.id);
        await this.keep();
      }
      async proceed() {
        const answers = Object.values(this.conversation.nodes)
          .filter((node) => node.role === "assistant" && node.state === "done");
        if (answers.length) await this.answer(answers[draw(answers.length)]);
      }
      async act() {
        await pause();
        const what = draw(6);
        if (what < 2) await this.question();
        else if (what === 2) await this.proceed();
        else if (what === 3) await this.shelf.refresh(this.conversation);
        else if (what === 4) {
          this.conversation.leaf = newestLeaf(this.conversation, Object.values(this.conversation.nodes)[0]);
          await this.keep();
        } else {
          this.conversation.title = this.name + ++this.said;
          titles.add(this.conversation.title);
          await this.keep();
        }
      }
    }
    if (ask.corrected) {
      // Both tabs know an answer; one learns that it is stale, the other that it is verified.
      const both = newConversation();
      const question = add(both, "", "user", "asked");
      Object.assign(add(both, question.id, "assistant", "said"), { stream: "s", verified: false });
      rows.set(both.id, copy(both));
      const [one, other] = [new Tab("a"), new Tab("b")];
      for (const tab of [one, other]) await tab.open();
      const answer = (tab) => Object.values(tab.conversation.nodes).at(-1);
      Object.assign(answer(one), { stale: true });
      Object.assign(answer(other), { verified: true });
      for (const tab of ask.corrected === "first" ? [one, other] : [other, one]) await tab.keep();
      return Object.values(rows.get(both.id).nodes)
        .filter((node) => node.role === "assistant")
        .map((node) => [Boolean(node.stale), node.verified]);
    }
    const written = new Set(["first"]);
    const titles = new Set(["first"]);
    const begun = newConversation();
    add(begun, "", "user", "first");
    rows.set(begun.id, copy(begun));
    const tabs = [new Tab("a"), new Tab("b")];
    for (const tab of tabs) await tab.open();
    await Promise.all(tabs.map(async (tab) => {
      await tab.question();
      for (let at = 0; at < ask.steps; at++) await tab.act();
    }));
    for (const tab of tabs) await tab.keep();
    const stored = rows.get(begun.id);
    const all = Object.values(stored.nodes).map((node) => node.text).join("\n");
    for (const tab of tabs) await tab.shelf.refresh(tab.conversation);
    const inOrder = (one) => JSON.stringify(Object.entries(one.nodes).sort());
    return {
      lost: [...written].filter((text) => !all.includes(text)),
      sound: sound(stored),
      titled: titles.has(stored.title),
      same: tabs.every((tab) => inOrder(tab.conversation) === inOrder(stored)),
      nodes: Object.keys(stored.nodes).length,
    };
"""
Json = dict[str, Any]


def message(id: str, parent: str = "", **more: Any) -> Json:
    return {"id": id, "parent": parent, "role": "user", "text": "t", "at": 1, **more}


def conversation(*messages: Json, **more: Any) -> Json:
    nodes = {one["id"]: one for one in messages}
    leaf = messages[-1]["id"] if messages else ""
    return {"id": "0" * 8, "title": "", "system": "", "leaf": leaf, "nodes": nodes, **more}


ONE = message("1" * 8)
TWO = message("2" * 8, "1" * 8, role="assistant")
BROKEN: dict[str, Any] = {
    "nothing": None,
    "text": "x",
    "list": [],
    "nodes as a list": conversation(nodes=[]),
    "no nodes": conversation(nodes=None),
    "circle of two": conversation(message("1" * 8, "2" * 8), TWO),
    "circle of one": conversation(message("1" * 8, "1" * 8)),
    "unknown parent": conversation(message("1" * 8, "3" * 8)),
    "parent of every object": conversation(message("1" * 8, "constructor")),
    "unknown leaf": conversation(ONE, leaf="3" * 8),
    "leaf of every object": conversation(ONE, leaf="constructor"),
    "node of every object": conversation(message("constructor")),
    "prototype": conversation(message("__proto__")),
    "other key": conversation(nodes={"3" * 8: ONE}, leaf=""),
    "no time": conversation(message("1" * 8, at="now")),
    "no text": conversation(message("1" * 8, text=None)),
    "system": conversation(message("1" * 8, role="system")),
    "id": conversation(ONE, id="../x"),
}


def test_a_conversation_that_begins_with_a_file_is_called_by_its_question(node: Node) -> None:
    """It was called "note.txt: ``` The lau…"."""
    note = {"file": "note.txt", "text": "The launch\n```\nx\n```\n"}
    data = {"file": "two words.csv", "text": "a,b"}
    for asked, title in (
        ([note, "When is it?"], "When is it?"),
        (["When is it?\n", note, data], "When is it?"),
        ([note, data], "note.txt, two words.csv"),
        (["Why is\n```\nx\n```\nslow?"], "Why is\n```\nx\n```\nslow?"),
    ):
        assert node.ask({"asked": asked}) == title


def test_files_that_are_no_conversations_are_refused(node: Node) -> None:
    judged = node.ask({"judge": list(BROKEN.values())})
    assert dict(zip(BROKEN, judged, strict=True)) == {name: [False, None] for name in BROKEN}


def test_an_imported_conversation_does_nothing_by_itself(node: Node) -> None:
    running = {**TWO, "state": "running", "stream": "chatcmpl-1", "before": "x", "where": "/"}
    hostile = {**running, "usage": {"tokens": 3, "seconds": "x", "y": {}}, "model": "m" * 999}
    given = conversation(ONE, {**hostile, "verified": True, "settled": 1}, title="t" * 999)
    ((sound, imported),) = node.ask({"judge": [given]})
    assert sound
    kept = imported["nodes"]["2" * 8]
    assert kept["state"] == "done"
    assert not {"stream", "before", "where"} & kept.keys()
    assert kept["usage"] == {"tokens": 3}
    assert kept["verified"] is True
    assert (len(imported["title"]), len(kept["model"])) == (80, 300)


def test_a_long_conversation_is_walked_without_recursion(node: Node) -> None:
    assert node.ask({"deep": 50_000}) == [True, 50_000, True]


@pytest.mark.parametrize("corrected", ["first", "last"])
def test_an_answer_behind_a_corrected_one_is_not_verified_by_another_tab(
    node: Node, corrected: str
) -> None:
    assert node.ask({"seed": 1, "corrected": corrected}) == [[True, False]]


@pytest.mark.parametrize("seed", range(200))
def test_two_tabs_lose_nothing(node: Node, seed: int) -> None:
    steps = random.Random(seed).randrange(3, 12)
    told = node.ask({"seed": seed, "steps": steps})
    assert told["lost"] == []
    assert told["sound"]
    assert told["titled"]
    assert told["same"], "both tabs show what is stored"
    assert told["nodes"] >= 5
