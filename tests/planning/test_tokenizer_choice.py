"""The kind and the vocabulary size of a new tokenizer."""

from tgen.planning.tokenizer_choice import choose_tokenizer


def test_vocabulary_grows_with_the_corpus_and_its_alphabet():
    assert choose_tokenizer(5_000, 60)[:2] == ("char", None)
    sizes = [choose_tokenizer(n, 60)[1] or 0 for n in (300_000, 10**6, 10**8, 10**10)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert (choose_tokenizer(10**6, 4000)[1] or 0) >= 8000
