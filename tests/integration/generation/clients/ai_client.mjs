// The package ai with both providers: a loop over a tool, whole and streamed.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , baseURL, folder] = process.argv;
const require = createRequire(folder + "/");
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      assert.equal(city, "Paris");
      return "sunny";
    },
  }),
};
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "shmserve", baseURL, apiKey: "none" });
for (const model of [openai("scripted"), openai.chat("scripted"), compatible("scripted")]) {
  const asked = { model, tools, prompt: "Weather?", stopWhen: stepCountIs(3), maxRetries: 0 };
  const whole = await generateText(asked);
  assert.equal(whole.text, "It is sunny.");
  assert.equal(whole.steps.length, 2);
  const streamed = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, "Look: It is sunny.");
  assert.equal((await streamed.steps).length, 2);
}
console.log("all is right");
