"""What the pages about each system show is run as it is shown; apart from test_blocks, for another worker."""

import pytest

from tests.docs import pages


@pytest.mark.docs
@pytest.mark.parametrize('page', pages.OF_SYSTEMS)
def test_what_a_page_of_a_system_shows_works(page, tmp_path):
  pages.run_as_shown(page, tmp_path)
