#!/usr/bin/env python3
"""OpenAI's own client against henson serve: pip install openai, then openai_client.py [http://127.0.0.1:8080] [MODEL] [KEY].

A model that writes is tried with completions, others with embeddings; without MODEL, the first that is served."""
import json
import sys
import urllib.request

import openai

url, model, key = (sys.argv[1:] + ['http://127.0.0.1:8080', '', 'none'][len(sys.argv) - 1:])[:3]
client = openai.OpenAI(base_url=f'{url}/v1', api_key=key, max_retries=0)
model = model or client.models.list().data[0].id
request = urllib.request.Request(f'{url}/models/{model}/info', headers={'Authorization': f'Bearer {key}'})
info = json.load(urllib.request.urlopen(request))


def completions():
    """Whole and streamed, with everything that the client's types name."""
    ask = lambda **more: client.completions.create(model=model, max_tokens=12, seed=1, **more)
    whole = ask(prompt='Jim Henson was', n=2, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.object == 'text_completion' and whole.model == model
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for choice in whole.choices:
        assert choice.finish_reason in ('stop', 'length') and ''.join(choice.logprobs.tokens) == choice.text
        assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset)
    assert ask(prompt='Jim Henson was').choices[0].text == whole.choices[0].text
    texts, usage, parts = ['', ''], None, 0
    for part in ask(prompt='Jim Henson was', n=2, stream=True, stream_options={'include_usage': True}):
        usage, parts = part.usage or usage, parts + 1
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices] and usage == whole.usage, (texts, whole)
    both = ask(prompt=['a', 'b'], echo=not info['encoder_decoder'], temperature=0, logit_bias={'5': -100}, stop=['\n'], best_of=2)
    assert len(both.choices) == 2
    # Whoever stops reading closes the connection, and the server stops writing.
    with ask(prompt='Jim Henson was', stream=True) as stream:
        next(iter(stream))
    refused([(dict(prompt='a', suffix='b'), openai.UnprocessableEntityError), (dict(prompt=[]), openai.BadRequestError),
             (dict(prompt='a', best_of=3, stream=True), openai.UnprocessableEntityError), (dict(prompt='a', max_tokens=10 ** 9), openai.UnprocessableEntityError),
             (dict(prompt='a', extra_body={'beams': 3}), openai.UnprocessableEntityError)], client.completions.create)
    print(f'{model}: {parts} parts, {usage.completion_tokens} tokens, {texts[0]!r}')


def refused(cases, create):
    for wrong, kind in cases:
        try:
            create(**{'model': model, **wrong})
            sys.exit(f'{wrong} was accepted')
        except kind as error:
            print(f'{kind.__name__}: {error}')


if 'generate' in info['abilities']:
    completions()
    sys.exit()

texts = ['Jim Henson was a puppeteer.', 'He made puppets.', 'It rains in London.']

# Without encoding_format, the client asks for base64 and unpacks it itself.
packed = client.embeddings.create(model=model, input=texts)
plain = client.embeddings.create(model=model, input=texts, encoding_format='float')
assert [item.index for item in plain.data] == [0, 1, 2] and packed.usage.total_tokens > 0
for a, b in zip(packed.data, plain.data):
    assert len(a.embedding) == len(b.embedding) and max(abs(x - y) for x, y in zip(a.embedding, b.embedding)) < 1e-7
short = client.embeddings.create(model=model, input=texts[0], dimensions=8)
assert len(short.data[0].embedding) == 8
dot = lambda a, b: sum(x * y for x, y in zip(plain.data[a].embedding, plain.data[b].embedding))
assert dot(0, 1) > dot(0, 2), (dot(0, 1), dot(0, 2))

refused([(dict(model='no-such-model', input='a'), openai.NotFoundError), (dict(input=''), openai.BadRequestError),
         (dict(input='a', dimensions=100000), openai.UnprocessableEntityError)], client.embeddings.create)
print(f'{model}: {len(plain.data[0].embedding)} dimensions, similar {dot(0, 1):.3f}, other {dot(0, 2):.3f}')
