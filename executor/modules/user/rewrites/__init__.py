"""What is changed in a user's exported graph before it is cut: attention, dropout, functions of their own, seams."""
