// OpenAI's own client for Node: a tool call and its result in both APIs, whole and streamed.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , baseURL, folder] = process.argv;
const require = createRequire(folder + "/");
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")));

const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const chat = {
  model: "scripted",
  messages: [{ role: "user", content: "Weather?" }],
  tools: [{ type: "function", function: { name: "get_weather", parameters, strict: true } }],
};
const whole = await client.chat.completions.create(chat);
const [call] = whole.choices[0].message.tool_calls;
assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
chat.messages.push(whole.choices[0].message);
chat.messages.push({ role: "tool", tool_call_id: call.id, content: "sunny" });
const runner = client.chat.completions.stream(chat);
assert.equal(await runner.finalContent(), "It is sunny.");

const input = [{ role: "user", content: "Weather?" }];
const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
const response = await client.responses.create({ model: "scripted", input, tools });
const made = response.output.at(-1);
assert.deepEqual(JSON.parse(made.arguments), { city: "Paris" });
input.push(...response.output);
input.push({ type: "function_call_output", call_id: made.call_id, output: "sunny" });
const stream = client.responses.stream({ model: "scripted", input, tools });
assert.equal((await stream.finalResponse()).output_text, "It is sunny.");
console.log("all is right");
