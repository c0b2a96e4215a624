// SPDX-License-Identifier: Apache-2.0
//
// As clients.py, with the OpenAI client for JavaScript: node client.mjs BASE_URL MODEL direct|envoy
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(-3);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const common = { model, temperature: 0, max_tokens: 12, seed: 1 };
const long = "Every block of a cache is named by all that stands before it. ".repeat(12);
const messages = (text) => [{ role: "system", content: long }, { role: "user", content: text }];
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { sky: { type: "string" } } } } }];
const whole = (r) => [r.choices[0].message.content, r.choices[0].finish_reason, r.usage.prompt_tokens, r.usage.completion_tokens];

async function joined(args) {
  let text = "", usage = null;
  for await (const c of await client.chat.completions.create({ ...common, ...args, stream: true, stream_options: { include_usage: true } })) {
    text += c.choices[0]?.delta?.content ?? "";
    usage = c.usage ? [c.usage.prompt_tokens, c.usage.completion_tokens] : usage;
  }
  return [text, usage];
}

const out = {};
async function scenario(name, run) {
  try {
    out[name] = await run();
  } catch (e) { // what a client makes of an error is compared, too
    out[name] = [e.constructor.name, e.status ?? null];
  }
}

const chats = { chat: { messages: messages("Why? 👩‍💻 naïve 中文") }, tools: { messages: messages("What is the weather?"), tools } };
await scenario("models", async () => (await client.models.list()).data.map((m) => m.id));
for (const [name, args] of Object.entries(chats)) {
  await scenario(name, async () => whole(await client.chat.completions.create({ ...common, ...args })));
  await scenario(name + ", streamed", () => joined(args));
}
await scenario("at once", () => Promise.all(Object.values(chats).map(joined)));
await scenario("completion", async () => (await client.completions.create({ model, prompt: long, max_tokens: 5, temperature: 0, seed: 1 })).choices[0].text);
await scenario("unknown model", () => client.chat.completions.create({ ...common, model: "nobody's", messages: messages("a") }));
await scenario("cancelled", async () => {
  const stream = await client.chat.completions.create({ ...common, max_tokens: 2000, messages: messages("go on"), stream: true, ignore_eos: true });
  let n = 0;
  for await (const _ of stream) if (++n === 3) break;
  return n;
});
console.log(JSON.stringify(out));
