#!/usr/bin/env python3
"""OpenAI's own client against henson serve: pip install openai, then openai_client.py [http://127.0.0.1:8080] [MODEL] [KEY]."""
import sys

import openai

url, model, key = (sys.argv[1:] + ['http://127.0.0.1:8080', '', 'none'][len(sys.argv) - 1:])[:3]
client = openai.OpenAI(base_url=f'{url}/v1', api_key=key, max_retries=0)
model = model or client.models.list().data[0].id
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

for wrong, kind in [(dict(model='no-such-model', input='a'), openai.NotFoundError), (dict(model=model, input=''), openai.BadRequestError),
                    (dict(model=model, input='a', dimensions=100000), openai.UnprocessableEntityError)]:
    try:
        client.embeddings.create(**wrong)
        sys.exit(f'{wrong} was accepted')
    except kind as error:
        print(f'{kind.__name__}: {error}')
print(f'{model}: {len(plain.data[0].embedding)} dimensions, similar {dot(0, 1):.3f}, other {dot(0, 2):.3f}')
