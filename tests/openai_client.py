"""Drives da-serve with the openai client, unchanged: python3 tests/openai_client.py BASE_URL KEY."""

import sys

import openai

base_url, key = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)

model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model

messages = [{"role": "user", "content": "the rain in spain"}]
chat = client.chat.completions.create(
    model=model, messages=messages, max_tokens=20, temperature=0, logprobs=True, top_logprobs=2
)
assert chat.choices[0].message.role == "assistant"
assert chat.choices[0].finish_reason in ("length", "stop")
assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2

stream = client.chat.completions.create(
    model=model,
    messages=messages,
    max_tokens=20,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
text, usage, finish = "", None, None
for chunk in stream:
    if chunk.usage:
        usage = chunk.usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
assert text == chat.choices[0].message.content, (text, chat.choices[0].message.content)
assert usage == chat.usage and finish == chat.choices[0].finish_reason

completion = client.completions.create(
    model=model,
    prompt=["the rain", "x"],
    max_tokens=5,
    n=2,
    seed=1,
    logprobs=2,
    extra_body={"return_token_ids": True, "prompt_logprobs": 3, "ignore_eos": True},
)
assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
assert len(completion.choices[0].logprobs.tokens) == 5
assert len(completion.choices[0].token_ids) == 5
scored = completion.choices[0].prompt_logprobs
assert scored[0] is None and len(scored) == len(completion.choices[0].prompt_token_ids)

parts = client.completions.create(model=model, prompt="x", max_tokens=8, stream=True, temperature=0)
whole = client.completions.create(model=model, prompt="x", max_tokens=8, temperature=0)
assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def refused(kind, call):
    try:
        call()
    except kind as error:
        assert error.body["message"], error
        return
    raise AssertionError(f"{kind.__name__} expected")


chats = client.chat.completions.create
refused(openai.NotFoundError, lambda: chats(model="other", messages=messages))
refused(openai.BadRequestError, lambda: chats(model=model, messages=messages, temperature=-1))
refused(openai.BadRequestError, lambda: chats(model=model, messages=messages, max_tokens=100000))
refused(openai.BadRequestError, lambda: chats(model=model, messages=[]))
stranger = openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0)
refused(openai.AuthenticationError, lambda: stranger.models.list())

# A client that walks away in the middle of a stream must not disturb the next one.
for chunk in client.completions.create(model=model, prompt="x", max_tokens=200, stream=True):
    break
assert client.completions.create(model=model, prompt="x", max_tokens=1).usage.completion_tokens == 1
print("openai", openai.__version__, "is content")
