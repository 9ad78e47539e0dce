"""What trains: a closed group's advantages, the batch it joins, the version that batch makes."""
